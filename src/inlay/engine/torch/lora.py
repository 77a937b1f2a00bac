"""Low-rank adapters: what is added to a linear layer's product for the positions that are for an adapter.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021): y += scale * (x A^T) B^T.
Every linear has room for the same number of adapters, a slot each, padded to the largest rank that
is allowed. A step computes with the slots from the first to the last that one of its positions is
for: one product down to their ranks, in which whatever is not a position's own is set to zero, and
one back up. A few positions on a CPU go through a native kernel, each with its own slot only.
Without such positions nothing is computed and nothing is read.

Shapes: T positions, S slots of a step, R largest rank, P parts of a fused linear, I inputs, O
outputs of a part.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from inlay.engine.torch.native import Kernels
from inlay.errors import EngineError

NATIVE_POSITIONS = 32
"""Positions up to which the native kernel is taken; from there on products win."""

BASE = -1
"""The slot of positions that are for no adapter."""


class Selection(NamedTuple):
    """Which slots a step computes with.

    Attributes:
        first: of the slots.
        stop: past the last.
        foreign: [T, S] bool, True where a slot is not the position's own; None where all are.
        rows: int32, the positions that are for an adapter, ordered by slot.
        slots: int32, of each of `rows`.
    """

    first: int
    stop: int
    foreign: Tensor | None
    rows: Tensor
    slots: Tensor

    @classmethod
    def of(
        cls, slots: Sequence[int], counts: Sequence[int], rows: int, device: torch.device
    ) -> "Selection | None":
        """The selection for a batch, or None where no position is for an adapter.

        Args:
            slots: of each span, or `BASE`; none at all where no span has one.
            counts: positions of each span.
            rows: positions, with those that are padding at the end.
            device: of the model.
        """
        used = {slot for slot in slots if slot != BASE}
        if not used:
            return None
        first, stop = min(used), max(used) + 1
        # Nobody looks at padding: it goes with the last span.
        counts = [*counts[:-1], rows - sum(counts[:-1])]
        own = torch.tensor(list(slots)).repeat_interleave(torch.tensor(counts))
        order = own.argsort(stable=True)
        order = order[int((own == BASE).sum()) :]
        adapted, of_adapted = order.int(), own[order].int()
        if stop - first == 1 and len(adapted) == len(own):
            return cls(first, stop, None, adapted, of_adapted)
        foreign = (own[:, None] != torch.arange(first, stop)).to(device)
        return cls(first, stop, foreign, adapted, of_adapted)


class LowRankPair(NamedTuple):
    """One linear's matrices, scale included: `down` [r, I], `up` [r, O].

    Model dtype, on the host.
    """

    down: Tensor
    up: Tensor


class AdaptedLinear(nn.Module):
    """A linear, and what adapters add to it."""

    def __init__(
        self,
        linear: nn.Module,
        bank: "LoraBank",
        weight: Tensor,
        sizes: Sequence[int],
        kernels: Kernels | None = None,
    ) -> None:
        """Make room around `linear`, whose weight was `weight` [sum of sizes, I] and whose parts have `sizes` outputs."""
        super().__init__()
        self._kernels = kernels
        self._linear = linear
        self._bank = bank
        self._sizes = list(sizes)
        self._down = _zeros((bank.slots, len(sizes), bank.rank, weight.shape[1]), weight)
        self._up = [_zeros((bank.slots, bank.rank, size), weight) for size in sizes]
        self._filled: set[int] = set()

    def shape(self, part: int) -> tuple[int, int]:
        """(outputs, inputs) of a part."""
        return self._sizes[part], self._down.shape[-1]

    def forward(self, x: Tensor) -> Tensor:
        """[..., I] to [..., sum of the parts' outputs]."""
        output: Tensor = self._linear(x)
        selection = self._bank.selection
        if selection is not None and not self._filled.isdisjoint(
            range(selection.first, selection.stop)
        ):
            self._add(selection, x.reshape(-1, x.shape[-1]), output.view(-1, output.shape[-1]))
        return output

    def _add(self, selection: Selection, x: Tensor, output: Tensor) -> None:
        if self._kernels is not None and len(selection.rows) <= NATIVE_POSITIONS:
            self._kernels.adapt(
                output, x.contiguous(), self._down, self._up, selection.rows, selection.slots
            )
            return
        slots = slice(selection.first, selection.stop)
        low = x @ self._down[slots].flatten(0, 2).T
        low = low.view(len(x), -1, len(self._sizes), self._bank.rank)
        if selection.foreign is not None:
            # Set, not multiplied: what is not finite would survive that.
            low.masked_fill_(selection.foreign[:, :, None, None], 0)
        first = 0
        for part, size in enumerate(self._sizes):
            up = self._up[part][slots].flatten(0, 1)
            output[:, first : first + size].addmm_(low[:, :, part].flatten(1), up)
            first += size

    def put(self, slot: int, part: int, low: LowRankPair) -> None:
        """Fill a slot of a part that is empty."""
        rank = len(low.down)
        self._down[slot, part, :rank].copy_(low.down, non_blocking=True)
        self._up[part][slot, :rank].copy_(low.up, non_blocking=True)
        self._filled.add(slot)

    def clear(self, slot: int) -> None:
        """Empty a slot of all parts."""
        if slot in self._filled:
            self._down[slot].zero_()
            for up in self._up:
                up[slot].zero_()
            self._filled.remove(slot)


class LoraBank:
    """The room for adapters in a model's linears, all of them together.

    Attributes:
        slots: adapters there is room for.
        rank: of an adapter at most.
        selection: what the forward pass under way computes with, None for nothing.
    """

    def __init__(self, slots: int, rank: int) -> None:
        self.slots = slots
        self.rank = rank
        self.selection: Selection | None = None
        self._places: dict[str, tuple[AdaptedLinear, int]] = {}
        self._free = list(range(slots))

    def adapt(
        self,
        linear: nn.Module,
        weight: Tensor,
        names: Sequence[str],
        sizes: Sequence[int],
        kernels: Kernels | None = None,
    ) -> nn.Module:
        """What stands in the place of a linear.

        Args:
            linear: computes the product with `weight`.
            weight: [sum of sizes, I].
            names: of the modules whose product it is, as the model's author calls them, in order.
            sizes: their outputs.
            kernels: add what adapters do to a few positions.
        """
        adapted = AdaptedLinear(linear, self, weight, sizes, kernels)
        self._places |= {name: (adapted, part) for part, name in enumerate(names)}
        return adapted

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """(outputs, inputs) of each module that may be adapted, by its name."""
        return {name: adapted.shape(part) for name, (adapted, part) in self._places.items()}

    @property
    def free(self) -> int:
        """Slots that are empty."""
        return len(self._free)

    @torch.inference_mode()
    def put(self, lows: Mapping[str, LowRankPair]) -> int:
        """Fill the first free slot; its number.

        Args:
            lows: by module, of its shape and at most `rank`; the other modules stay as they are.

        Raises:
            EngineError: no slot is free, or a module is not there.
        """
        if not self._free:
            raise EngineError(f"all {self.slots} slots for adapters are taken")
        slot = self._free[0]
        try:
            for name, low in lows.items():
                adapted, part = self._places[name]
                adapted.put(slot, part, low)
        except Exception as error:
            self._clear(slot)
            raise EngineError(f"an adapter could not be put into the model: {error}") from error
        del self._free[0]
        return slot

    @torch.inference_mode()
    def remove(self, slot: int) -> None:
        """Empty a slot no sequence uses."""
        self._clear(slot)
        self._free = sorted([*self._free, slot])

    def _clear(self, slot: int) -> None:
        for adapted, _ in self._places.values():
            adapted.clear(slot)

    @contextmanager
    def selected(self, selection: Selection | None) -> Iterator[None]:
        """Within it, forward passes compute with `selection`."""
        self.selection = selection
        try:
            yield
        finally:
            self.selection = None


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Zeros of the dtype and on the device of another tensor.

    On a CPU they take memory only once they are written.
    """
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    memory = np.zeros(prod(shape) * like.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(like.dtype).view(shape)


__all__ = ["BASE", "NATIVE_POSITIONS", "AdaptedLinear", "LoraBank", "LowRankPair", "Selection"]
