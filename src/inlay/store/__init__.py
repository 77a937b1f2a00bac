"""Stored prompts: embeddings uploaded once and used many times by reference, each by its owner alone."""

from inlay.store.entry import StoredPrompt, Target
from inlay.store.prompts import OwnPrompts, Prompts
from inlay.store.secret import load_secret, read_key
from inlay.store.settings import FleetStoreSettings, StoreSettings
from inlay.store.store import PromptStore, StoreStats

__all__ = [
    "FleetStoreSettings",
    "OwnPrompts",
    "PromptStore",
    "Prompts",
    "StoreSettings",
    "StoreStats",
    "StoredPrompt",
    "Target",
    "load_secret",
    "read_key",
]
