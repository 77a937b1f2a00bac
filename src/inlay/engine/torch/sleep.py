"""Sleep of an engine: release its memory, and restore it.

On a CPU nothing is kept: the checkpoint, perhaps still in the page cache, is read and packed again.
On a GPU, level 1 copies weights to pinned host memory; every tensor of the model stays in place
with its storage emptied, so tensors that share memory share it again after waking. Level 2 reads
the checkpoint again.
"""

import gc
from collections.abc import Callable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from pathlib import Path
from typing import Generic, Protocol, TypeVar

import msgspec
import torch
from torch import Tensor, nn

from inlay.base.allocator import trim
from inlay.base.errors import InvalidRequestError
from inlay.messages.card import Stats

TAGS = ("weights", "kv_cache")
"""Parts that can be restored separately; names are vLLM's."""

_GAUGES = ("running", "waiting", "blocks_used", "blocks_total", "image_cache_bytes")


class Restorable(Protocol):
    """A loaded model, whose tensors `storages` finds."""

    @property
    def path(self) -> str | Path:
        """Its directory."""

    @property
    def weights_id(self) -> str:
        """Identity of its weights."""

    @property
    def device(self) -> torch.device:
        """Device that it runs on."""


M = TypeVar("M", bound=Restorable)


class SleepState(Generic[M]):
    """The weights of a sleeping engine, and the parts that are restored."""

    def __init__(self, load: Callable[[], M], weights_id: str) -> None:
        self._load = load
        self._weights_id = weights_id
        self._host_copy: tuple[M, HostCopy] | None = None
        self._model: M | None = None
        self._awake: set[str] = set()

    def offload(self, models: list[M | None], level: int) -> None:
        """Release the memory of the model in `models`, if any; no other reference may exist.

        Empties the list. Blocks.
        """
        self._model, self._host_copy = None, None
        self._awake.clear()
        model = models.pop()
        if model is not None and level == 1 and model.device.type == "cuda":
            self._host_copy = model, HostCopy(storages(model, model.device))
        del model
        give_back()

    def restore(self, tags: Sequence[str]) -> bool:
        """Restore the weights if `tags` name them; return True if all parts are restored. Blocks.

        The cache has no content: the engine allocates it once the weights are restored.

        Raises:
            InvalidRequestError: the checkpoint cannot be loaded any more, or has changed.
        """
        if "weights" in tags and self._model is None:
            self._model = self._back()
            # Free the temporary memory of loading, which the allocator would keep: sleeping freed
            # blocks of similar sizes.
            give_back()
        self._awake.update(tags)
        return self._awake.issuperset(TAGS)

    def _back(self) -> M:
        if self._host_copy is not None:
            model, aside = self._host_copy
            aside.restore()
            self._host_copy = None
            return model
        model = self._load()
        if model.weights_id != self._weights_id:
            raise InvalidRequestError(
                f"{model.path} is not what it was when the engine fell asleep: start the worker "
                "again"
            )
        return model

    def model(self) -> M:
        """The model, once its weights are restored."""
        return self._load() if self._model is None else self._model


BLOCK_BYTES = 1 << 28
"""Size of a block of host memory.

A power of two: torch rounds what is pinned up to one, which would be up to twice the weights if
each storage, or all together, had a block of its own.
"""


class HostCopy:
    """Copy of storages in host memory; the storages themselves are empty until `restore`.

    Attributes:
        blocks: the memory, uint8, `BLOCK_BYTES` each but for the last; the content of the storages
            one after another, across the ends of blocks.
    """

    def __init__(self, storages: Sequence[torch.UntypedStorage]) -> None:
        """Copy `storages`, all of one device, and empty each when it is copied."""
        self._sizes = [(storage, storage.nbytes()) for storage in storages]
        total = sum(size for _, size in self._sizes)
        pinned = any(storage.device.type == "cuda" for storage in storages)
        self.blocks = [
            torch.empty(min(BLOCK_BYTES, total - start), dtype=torch.uint8, pin_memory=pinned)
            for start in range(0, total, BLOCK_BYTES)
        ]
        for storage, _, pieces in self._pieces():
            for piece, part in zip(pieces, _parts_of(storage, pieces), strict=True):
                piece.copy_(part)
            storage.resize_(0)

    def restore(self) -> None:
        """Copy the content back to its storages and drop the host copy."""
        for storage, size, pieces in self._pieces():
            storage.resize_(size)
            for piece, part in zip(pieces, _parts_of(storage, pieces), strict=True):
                part.copy_(piece)
        self._sizes.clear()
        self.blocks.clear()

    def _pieces(self) -> Iterator[tuple[torch.UntypedStorage, int, list[Tensor]]]:
        """Yield each storage, its bytes, and where they are in `blocks`, in order."""
        start = 0
        for storage, size in self._sizes:
            end, pieces = start + size, list[Tensor]()
            while start < end:
                block, offset = divmod(start, BLOCK_BYTES)
                pieces.append(self.blocks[block][offset : offset + end - start])
                start += len(pieces[-1])
            yield storage, size, pieces


def _parts_of(storage: torch.UntypedStorage, pieces: list[Tensor]) -> Sequence[Tensor]:
    """Return the bytes of a storage in parts as long as `pieces`."""
    return torch.split(_bytes(storage), [len(piece) for piece in pieces])


def _bytes(storage: torch.UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages(root: object, device: torch.device) -> list[torch.UntypedStorage]:
    """Return the storages on `device` of all tensors reachable from `root`, each once.

    Modules, containers and inlay's own objects are searched: some parts of a model are not in a
    module.
    """
    found: dict[int, torch.UntypedStorage] = {}
    seen: set[int] = set()
    pending: list[object] = [root]
    while pending:
        item = pending.pop()
        if id(item) in seen:
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            if item.device == device and item.layout is torch.strided:
                storage = item.untyped_storage()
                found[storage.data_ptr()] = storage
        else:
            pending.extend(_parts(item))
    found.pop(0, None)
    return list(found.values())


def _parts(item: object) -> Iterator[object]:
    if isinstance(item, Mapping):
        yield from item.values()
    elif isinstance(item, (Sequence, AbstractSet)) and not isinstance(item, (str, bytes)):
        yield from item
    elif isinstance(item, nn.Module) or type(item).__module__.startswith("inlay."):
        yield from getattr(item, "__dict__", {}).values()
        yield from (getattr(item, name, None) for name in getattr(item, "__slots__", ()))


def give_back() -> None:
    """Return free memory to the operating system, and to other users of the device."""
    gc.collect()
    if torch.cuda.is_available():
        torch.cuda.empty_cache()
        # Pinned memory of weights that are back on the device.
        torch.accelerator.empty_host_cache()
    trim()


def add_stats(before: Stats, now: Stats) -> Stats:
    """Return the counters of an engine that counted `before`, slept, and counts `now` since."""
    earlier = msgspec.structs.asdict(before)
    totals = {
        name: value + earlier[name]
        for name, value in msgspec.structs.asdict(now).items()
        if name not in _GAUGES
    }
    return msgspec.structs.replace(now, **totals)
