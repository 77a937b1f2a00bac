"""The adapters of a model: by name, in which slot, and what their content is."""

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.adapter import LoraFiles, LoraPair, open_adapter
from inlay.adapter.files import check_fits, elements
from inlay.engine.torch.lora import BASE, LoraBank, Low
from inlay.errors import InvalidRequestError, NotFoundError
from inlay.tensors.table import StoredTensor


class Placed(NamedTuple):
    """An adapter in its slot.

    Attributes:
        slot: in the model's linears.
        content_id: digest of its content; what was computed with it is cached under that.
    """

    slot: int
    content_id: str | None


NONE = Placed(BASE, None)


class LoraAdapters:
    """The LoRA adapters a model holds. Changed in the engine's thread, between steps; which there are may be asked in any."""

    def __init__(self, bank: LoraBank | None) -> None:
        self._bank = bank
        self._placed: dict[str, Placed] = {}

    def __contains__(self, name: object) -> bool:
        return name in self._placed

    def of(self, name: str | None) -> Placed:
        """Where an adapter is, `NONE` for none. Raises `NotFoundError`."""
        if name is None:
            return NONE
        if name not in self._placed:
            raise NotFoundError(f"the adapter {name!r} does not exist", param="model")
        return self._placed[name]

    def put(self, name: str, content_id: str, lows: Mapping[str, Low]) -> None:
        """Hold one more; all or nothing.

        Raises:
            InvalidRequestError: there is one of that name, or no room.
            EngineError: it could not be put into the model.
        """
        bank = bank_of(self._bank)
        if name in self._placed:
            raise InvalidRequestError(f"the adapter {name!r} is there already")
        if not bank.free:
            raise InvalidRequestError(
                f"{bank.slots} adapters are loaded, and there is room for no more (--max-loras and one to take another's place)"
            )
        self._placed[name] = Placed(bank.put(lows), content_id)

    def remove(self, name: str) -> None:
        """Let go of one that no sequence uses. Raises `NotFoundError`."""
        bank_of(self._bank).remove(self.of(name).slot)
        del self._placed[name]


def bank_of(bank: LoraBank | None) -> LoraBank:
    """The room for adapters. Raises `InvalidRequestError` where there is none."""
    if bank is None:
        raise InvalidRequestError("LoRA adapters are off; start the worker with --enable-lora")
    return bank


def read_lows(directory: str, bank: LoraBank, dtype: torch.dtype, device: torch.device) -> dict[str, Low]:
    """What a LoRA's files say of each linear, on the model's device.

    Raises:
        InvalidRequestError: not a LoRA, of too large a rank, for modules this model does not have or cannot adapt, or too large
            for the model's dtype.
        NotFoundError: the files are gone.
    """
    files = open_adapter(Path(directory))
    if not isinstance(files, LoraFiles):
        raise InvalidRequestError("the adapter is not a LoRA")
    if files.rank > bank.rank:
        raise InvalidRequestError(
            f"the adapter has rank {files.rank}; allowed: at most {bank.rank} (--max-lora-rank)"
        )
    shapes = bank.shapes()
    unknown = sorted(set(files.modules) - set(shapes))
    if unknown:
        raise InvalidRequestError(
            f"the adapter is for {len(unknown)} modules that this model does not have, or that are not adapted here: {unknown[0][:80]}; "
            f"adapted are linear layers such as {', '.join(sorted({name.rpartition('.')[2] for name in shapes}))}, not the embedding "
            "table, the head or experts"
        )
    check_fits(files, shapes)
    return {name: _low(name, pair, dtype, device) for name, pair in files.modules.items()}


def _low(name: str, pair: LoraPair, dtype: torch.dtype, device: torch.device) -> Low:
    down = _tensor(pair.down)
    up = _tensor(pair.up).to(torch.promote_types(dtype, torch.float32)) * pair.scale
    low = Low(down.to(device, dtype), up.T.contiguous().to(device, dtype))
    if not (torch.isfinite(low.down).all() and torch.isfinite(low.up).all()):
        raise InvalidRequestError(
            f"the adapter's matrices of {name[:80]} must be finite in the model's {dtype}"
        )
    return low


def _tensor(stored: StoredTensor) -> Tensor:
    """Its elements; bfloat16 and others by their bits, as numpy does not know them all."""
    array = elements(stored)
    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view("<i2")).view(torch.bfloat16)
    return torch.from_numpy(array)


__all__ = ["NONE", "LoraAdapters", "Placed", "bank_of", "read_lows"]
