"""Adapters as PEFT writes them: fetched, checked and read, whatever engine runs them. No torch."""

from inlay.adapter.files import AdapterFiles, LoraFiles, LoraPair, PromptFiles, open_adapter

__all__ = ["AdapterFiles", "LoraFiles", "LoraPair", "PromptFiles", "open_adapter"]
