"""The module ring of a model that is divided: each rank's share against its part of the whole.

All ranks compare the same modules in the same order, by rows that rank 0 has of the whole model's
own pass, and come to one result: otherwise one would wait for a sum that the others do not make.
"""

from collections.abc import Callable, Sequence

import msgspec
import torch
from torch import Tensor

from inlay.engine.torch.tensor_parallel.group import TensorParallelGroup

_SHARES = (".share", ".linear")
"""Ends of the path of a share, in the module that adds or joins those of all ranks."""


class Mode(msgspec.Struct, frozen=True, array_like=True):
    """The `plain` and `known` of rank 0 (`ModuleCheck`), and so of all."""

    plain: bool
    known: tuple[str, ...] | None


class ShareMessages:
    """The messages of ranks that compare modules."""

    def __init__(self, group: TensorParallelGroup) -> None:
        self._group = group
        self.size = group.size

    def mode(self, own: Mode) -> Mode:
        """Return that of rank 0."""
        return msgspec.msgpack.decode(
            self._group.share_bytes(msgspec.msgpack.encode(own)), type=Mode
        )

    def whole(self, path: str) -> str:
        """Return the path that a module had before the model was divided."""
        for ending in _SHARES:
            path = path.removesuffix(ending)
        return path

    def rows(
        self, kept: tuple[Tensor, Tensor] | None, like: Tensor
    ) -> tuple[Tensor, Tensor] | None:
        """Return the rows [R, in] and [R, out] that rank 0 has `kept`; None if it has none."""
        shape = (0, 0, 0) if kept is None else (*kept[0].shape, kept[1].shape[1])
        count, inputs, outputs = msgspec.msgpack.decode(
            self._group.share_bytes(msgspec.msgpack.encode(shape)), type=tuple[int, int, int]
        )
        if not count:
            return None
        if kept is None:
            kept = like.new_empty(count, inputs), like.new_empty(count, outputs)
        for part in kept:
            self._group.share(part)
        return kept

    def part(self, whole: Tensor) -> Tensor:
        """Return this rank's columns."""
        return whole.chunk(self.size, -1)[self._group.rank].contiguous()

    def adding(self, found: Callable[[Tensor], Tensor]) -> Callable[[Tensor], Tensor]:
        """Return the sum of what `found` computes on all ranks."""
        return lambda x: self._group.add(found(x).contiguous())

    def largest(self, numbers: Sequence[float]) -> list[float]:
        """Return the largest of each number over the ranks; infinite where it is none on one."""
        found: list[float] = self._group.largest(torch.tensor(numbers)).tolist()
        return found
