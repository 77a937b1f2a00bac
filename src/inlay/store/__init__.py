"""Stored prompts: embeddings uploaded once and used many times by reference, each by its owner alone."""

from inlay.store.entry import StoredPrompt, Target
from inlay.store.secret import load_secret, read_key
from inlay.store.settings import StoreSettings
from inlay.store.store import PromptStore, StoreStats

__all__ = ["PromptStore", "StoreSettings", "StoreStats", "StoredPrompt", "Target", "load_secret", "read_key"]
