"""The loaded LoRA adapters of an engine: host copies, and those in the model's slots."""

import re
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from inlay.adapter import LoraFiles, LoraPair, open_adapter
from inlay.adapter.files import check_fits, elements
from inlay.adapter.tables import ignore
from inlay.base.errors import InvalidRequestError, NotFoundError
from inlay.engine.torch.lora import BASE, LoraBank, LowRankPair
from inlay.tensors.stored import StoredTensor

_OUTER = re.compile(r"^(?:(?:model|language_model|text_model)\.)+")
"""Names of modules around a language model, which differ by the age of transformers."""


class CachedAdapter(NamedTuple):
    """An adapter in host memory.

    Attributes:
        content_id: digest of its content; part of the digests of everything computed with it.
        lows: matrices by module name.
    """

    content_id: str
    lows: Mapping[str, LowRankPair]


class LoraAdapters:
    """The loaded LoRA adapters of an engine.

    All are kept in host memory; those of a step are copied into the model's slots.

    Changed in the engine's thread only, between steps; lookups are safe in any thread.

    Args:
        bank: the model's slots; None if adapters are disabled.
        max_cpu_loras: maximum number of adapters; one more may be loaded to replace another.
    """

    def __init__(self, bank: LoraBank | None, max_cpu_loras: int) -> None:
        self._bank = bank
        self._max_cpu_loras = max_cpu_loras
        self._kept: dict[str, CachedAdapter] = {}
        self._slots: dict[str, int] = {}
        """Slots of the adapters in the model, the least recently used first."""

    def __contains__(self, name: object) -> bool:
        return name in self._kept

    def content_id(self, name: str) -> str:
        """Return the content id of an adapter. Raises `NotFoundError`."""
        return self._of(name).content_id

    def put(self, name: str, content_id: str, lows: Mapping[str, LowRankPair]) -> None:
        """Add an adapter, and copy it into the model if a slot is free; all or nothing.

        Raises:
            InvalidRequestError: the name is taken, or there is no room.
            EngineError: it could not be copied into the model.
        """
        bank = bank_of(self._bank)
        if name in self._kept:
            raise InvalidRequestError(f"the adapter {name!r} is there already")
        if len(self._kept) > self._max_cpu_loras:
            raise InvalidRequestError(
                f"{len(self._kept)} adapters are loaded, and there is room for no more "
                "(--max-cpu-loras and one to take another's place)"
            )
        if bank.free:
            self._slots[name] = bank.put(lows)
        self._kept[name] = CachedAdapter(content_id, lows)

    def remove(self, name: str) -> None:
        """Free an adapter that no sequence uses. Raises `NotFoundError`."""
        self._of(name)
        if name in self._slots:
            bank_of(self._bank).remove(self._slots.pop(name))
        del self._kept[name]

    def place(self, names: Iterable[str | None]) -> dict[str | None, int]:
        """Copy the adapters of a step into the model; return the slot of each, `BASE` for None.

        Raises:
            NotFoundError: an adapter is not loaded.
            EngineError: one could not be copied into the model.
        """
        wanted = dict.fromkeys(name for name in names if name is not None)
        for name in wanted:
            if name in self._slots:
                self._slots[name] = self._slots.pop(name)
        for name in wanted:
            if name not in self._slots:
                bank = bank_of(self._bank)
                if not bank.free:
                    bank.remove(
                        self._slots.pop(next(old for old in self._slots if old not in wanted))
                    )
                self._slots[name] = bank.put(self._of(name).lows)
        return {None: BASE, **{name: self._slots[name] for name in wanted}}

    def _of(self, name: str) -> CachedAdapter:
        if name not in self._kept:
            raise NotFoundError(f"the adapter {name!r} does not exist", param="model")
        return self._kept[name]


def bank_of(bank: LoraBank | None) -> LoraBank:
    """Return the bank. Raises `InvalidRequestError` if adapters are disabled."""
    if bank is None:
        raise InvalidRequestError("LoRA adapters are off; start the worker with --enable-lora")
    return bank


class Adaptable(Protocol):
    """Linear layers that take adapters."""

    @property
    def rank(self) -> int:
        """Largest rank of an adapter."""
        ...

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """(outputs, inputs) of each layer by its name."""
        ...


def read_lows(
    directory: str, bank: Adaptable, dtype: torch.dtype, *, pinned: bool = False
) -> dict[str, LowRankPair]:
    """Read a LoRA's matrices for each linear layer into host memory; as `lows_of`.

    Args:
        directory: directory of the adapter's files.
        bank: the layers it must fit.
        dtype: dtype of the model.
        pinned: use pinned memory, for asynchronous copies to a GPU.

    Raises:
        InvalidRequestError: not a LoRA, its rank is too large, its modules are not in this model or
            cannot be adapted, or its values overflow the model's dtype.
        NotFoundError: the files do not exist any more.
    """
    return lows_of(lora_files(directory), bank, dtype, pinned=pinned)


def lora_files(directory: str) -> LoraFiles:
    """Open the files of a LoRA. Raises as `open_adapter`, or `InvalidRequestError` for others.

    Its tables have been compared with the model's by whoever fetched it.
    """
    files = open_adapter(Path(directory), check_table=ignore)
    if not isinstance(files, LoraFiles):
        raise InvalidRequestError("the adapter is not a LoRA")
    return files


def lows_of(
    files: LoraFiles, bank: Adaptable, dtype: torch.dtype, *, pinned: bool = False
) -> dict[str, LowRankPair]:
    """Read the matrices of a LoRA's files into host memory.

    Raises:
        InvalidRequestError: its rank is too large, its modules are not in this model or cannot be
            adapted, or its values overflow the model's dtype.
    """
    if files.rank > bank.rank:
        raise InvalidRequestError(
            f"the adapter has rank {files.rank}; allowed: at most {bank.rank} (--max-lora-rank)"
        )
    shapes = bank.shapes()
    files = replace(files, modules=_named_as(files.modules, shapes))
    unknown = sorted(set(files.modules) - set(shapes))
    if unknown:
        raise InvalidRequestError(
            f"the adapter is for {len(unknown)} modules that this model does not have, or that are "
            f"not adapted here: {unknown[0][:80]}; adapted are linear layers such as "
            f"{', '.join(sorted({name.rpartition('.')[2] for name in shapes}))}, not the embedding "
            "table, the head or experts"
        )
    check_fits(files, shapes)
    return {name: _low(name, pair, dtype, pinned) for name, pair in files.modules.items()}


def _named_as(
    modules: Mapping[str, LoraPair], shapes: Mapping[str, tuple[int, int]]
) -> dict[str, LoraPair]:
    """Return modules by the names of this model, where they differ in `_OUTER` alone.

    Before transformers 4.52 the language model of an image-text model was `language_model.model` or
    `model`, and is now `model.language_model`; adapters of a text model may be served on it, and
    the other way round.
    """
    here = {_OUTER.sub("", name): name for name in shapes}
    found: dict[str, LoraPair] = {}
    for name, pair in modules.items():
        there = name if name in shapes else here.get(_OUTER.sub("", name), name)
        if there in found:
            raise InvalidRequestError(f"the adapter has two names for one module: {there[:80]}")
        found[there] = pair
    return found


def _low(name: str, pair: LoraPair, dtype: torch.dtype, pinned: bool) -> LowRankPair:
    down = _tensor(pair.down)
    up = _tensor(pair.up).to(torch.promote_types(dtype, torch.float32)) * pair.scale
    low = LowRankPair(down.to(dtype), up.T.contiguous().to(dtype))
    if not (torch.isfinite(low.down).all() and torch.isfinite(low.up).all()):
        raise InvalidRequestError(
            f"the adapter's matrices of {name[:80]} must be finite in the model's {dtype}"
        )
    return LowRankPair(low.down.pin_memory(), low.up.pin_memory()) if pinned else low


def _tensor(stored: StoredTensor) -> Tensor:
    """Return a tensor's elements; by their bits, as numpy lacks bfloat16 and others."""
    array = elements(stored)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("<i2")).view(torch.bfloat16)
    return torch.from_numpy(array)
