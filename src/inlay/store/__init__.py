"""Contents kept for reuse by reference: embeddings, images, and vectors of documents.

Only their owner finds them.

A frontend sees `StoredPrompts`. That is `LocalStoredPrompts` over one process's `PromptStore`, or
`fleet.FleetStore` over the storage of a fleet with a `PromptStore` as its cache.

    store.py         PromptStore      tiers of one process: memory, and files below a directory
    index.py         StoreIndex       locations, sizes and eviction order; pure bookkeeping
    tiers.py         Tiers            where a content goes, and how it comes back to memory
    disk.py          DiskTier         writes, reads and removes files, over directory.py
    file_format.py   FileFormat       the authenticated file; sealing.py encrypts it
    fleet.py         FleetStore       records and contents in a `shared.Shared`; no NATS
    shared.py        Record, Shared   metadata of a prompt in a fleet; storage with compare-and-set
    space.py         SharedSpace      room in a fleet's storage, made of what is least used
                     TenantQuotas     bytes of each tenant in a fleet, uploads in progress included
    reaper.py        Reaper           removes expired and orphaned objects, one frontend at a time
    secret.py        load_secret      the namespace's secret and other 32-byte keys

Invariants:

- An id is a digest of the tenant and the bytes, so a cached content is right for ever. Whether it
  may still be used is asked of the fleet's storage at every use.
- A record changes by compare-and-set alone, a content never: each upload writes one under a new
  name and then tries to put a record to it. Of two, one wins and the other's content is erased.
- Deleting marks the record, erases the content, removes the record. Interrupted anywhere, the
  prompt is gone for everyone and the rest can be done later.
- Of an image the file is kept, not its rows: they are 5 to 170 times larger and differ by model,
  dtype and encoder. Workers make them once and keep them by content.
- Another tenant's id is exactly as absent as one that was never given.
"""

from typing import TYPE_CHECKING

from inlay.base.lazy import exported

if TYPE_CHECKING:
    from inlay.store.entry import NewImage, NewVectors, StoredPrompt, StoreStats, Target
    from inlay.store.prompts import LocalStoredPrompts, StoredPrompts
    from inlay.store.secret import load_secret, read_key
    from inlay.store.settings import FleetStoreSettings, StoreSettings
    from inlay.store.store import PromptStore

__all__ = [
    "FleetStoreSettings",
    "LocalStoredPrompts",
    "NewImage",
    "NewVectors",
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
        "StoreStats": "entry",
        "StoredPrompt": "entry",
        "NewImage": "entry",
        "NewVectors": "entry",
        "Target": "entry",
        "LocalStoredPrompts": "prompts",
        "StoredPrompts": "prompts",
        "load_secret": "secret",
        "read_key": "secret",
        "FleetStoreSettings": "settings",
        "StoreSettings": "settings",
        "PromptStore": "store",
    },
)
