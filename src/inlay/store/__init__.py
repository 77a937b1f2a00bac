"""Stored prompts: embeddings uploaded once and used many times by reference, each by its owner alone."""

from typing import TYPE_CHECKING

from inlay.lazy import exported

if TYPE_CHECKING:
    from inlay.store.entry import StoredPrompt, Target
    from inlay.store.prompts import LocalStoredPrompts, StoredPrompts
    from inlay.store.secret import load_secret, read_key
    from inlay.store.settings import FleetStoreSettings, StoreSettings
    from inlay.store.store import PromptStore, StoreStats

__all__ = [
    "FleetStoreSettings",
    "LocalStoredPrompts",
    "PromptStore",
    "StoreSettings",
    "StoreStats",
    "StoredPrompt",
    "StoredPrompts",
    "Target",
    "load_secret",
    "read_key",
]

__getattr__ = exported(
    __name__,
    {
        "StoredPrompt": "entry",
        "Target": "entry",
        "LocalStoredPrompts": "prompts",
        "StoredPrompts": "prompts",
        "load_secret": "secret",
        "read_key": "secret",
        "FleetStoreSettings": "settings",
        "StoreSettings": "settings",
        "PromptStore": "store",
        "StoreStats": "store",
    },
)
