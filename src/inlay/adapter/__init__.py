"""Adapters in PEFT's format: fetch, check and read them, for every engine. No torch.

`AdapterLibrary` (`library.py`) turns an address into checked files on this machine: local
directories, `download.py` (HTTP), `s3.py` and `hub.py`; `cache.py` keeps fetched files on disk.
`AllowedSources` (`address.py`) limits the addresses and gives each exactly one reading.
`parse_config` (`config.py`) accepts or refuses an `adapter_config.json`. `open_adapter`
(`files.py`) finds config and tensors and checks shapes against file sizes; `content_id`,
`check_finite` and `check_fits` complete the checks.

Invariants: nothing is unpickled or memory-mapped, no allocation is larger than a checked file, and
only checked files enter the cache. Loading, draining and unloading are the worker's
(`inlay.worker.adapters`).
"""

from inlay.adapter.files import AdapterFiles, LoraFiles, LoraPair, PromptFiles, open_adapter

__all__ = ["AdapterFiles", "LoraFiles", "LoraPair", "PromptFiles", "open_adapter"]
