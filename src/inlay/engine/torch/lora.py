"""LoRA: low-rank adapters added to a linear layer's output, per position.

Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models" (2021): y += scale * (x A^T) B^T.
Every linear has the same number of adapter slots, padded to the maximum rank. A step uses the slots
from the first to the last that its positions need: one product down to the ranks, in which the
values of other positions' slots are set to zero, and one product back up. For few positions on a
CPU, a native kernel uses only each position's own slot. Without adapters in the batch nothing is
computed or read.

Shapes: T positions, S slots of a step, R maximum rank, P parts of a fused linear, I inputs, O
outputs of a part.
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import prod
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from inlay.base.errors import EngineError
from inlay.engine.torch.native import ALL_ROWS, Kernels
from inlay.engine.torch.transfers import upload

NATIVE_POSITIONS = 32
"""Maximum number of positions for the native kernel; beyond, products are faster."""

BASE = -1
"""Slot of positions without an adapter."""


class Selection(NamedTuple):
    """The slots that a step computes with.

    Attributes:
        first: first slot.
        stop: slot after the last.
        foreign: [T, S] bool, True for slots other than the position's own; None if there are none.
        rows: int32, positions with an adapter, ordered by slot.
        slots: int32, slot of each of `rows`.
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
        """Return the selection for a batch, or None if no position has an adapter.

        Args:
            slots: slot of each chunk, or `BASE`; empty if no chunk has one.
            counts: positions of each chunk.
            rows: number of positions, padding at the end included.
            device: device of the model.
        """
        used = {slot for slot in slots if slot != BASE}
        if not used:
            return None
        first, stop = min(used), max(used) + 1
        # Padding gets the slot of the last chunk; its result is not used.
        counts = [*counts[:-1], rows - sum(counts[:-1])]
        own = torch.tensor(list(slots)).repeat_interleave(torch.tensor(counts))
        order = own.argsort(stable=True)
        order = order[int((own == BASE).sum()) :]
        adapted, of_adapted = order.int(), own[order].int()
        if stop - first == 1 and len(adapted) == len(own):
            return cls(first, stop, None, adapted, of_adapted)
        foreign = upload(own[:, None] != torch.arange(first, stop), device)
        return cls(first, stop, foreign, adapted, of_adapted)


class LowRankPair(NamedTuple):
    """One linear's matrices, scale included: `down` [r, I], `up` [r, O].

    In the model's dtype, on the host.
    """

    down: Tensor
    up: Tensor


class AdaptedLinear(nn.Module):
    """A linear layer with adapter slots.

    Attributes:
        invariant: True if the bits that adapters add to a row do not depend on the number of rows.
    """

    def __init__(
        self,
        linear: nn.Module,
        bank: "LoraBank",
        weight: Tensor,
        sizes: Sequence[int],
        kernels: Kernels | None = None,
        *,
        invariant: bool = False,
    ) -> None:
        """Wrap `linear`, with parts of `sizes`; `weight` is that of a part, [its size, I]."""
        super().__init__()
        self._kernels = kernels
        self.invariant = invariant and kernels is not None
        self._most = ALL_ROWS if self.invariant else NATIVE_POSITIONS
        self._linear = linear
        self._bank = bank
        self._sizes = list(sizes)
        self._down = _zeros((bank.slots, len(sizes), bank.rank, weight.shape[1]), weight)
        self._up = [_zeros((bank.slots, bank.rank, size), weight) for size in sizes]
        self._filled: set[int] = set()

    def shape(self, part: int) -> tuple[int, int]:
        """Return (outputs, inputs) of a part."""
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
        if self._kernels is not None and len(selection.rows) <= self._most:
            self._kernels.adapt(
                output, x.contiguous(), self._down, self._up, selection.rows, selection.slots
            )
            return
        slots = slice(selection.first, selection.stop)
        low = x @ self._down[slots].flatten(0, 2).T
        low = low.view(len(x), -1, len(self._sizes), self._bank.rank)
        if selection.foreign is not None:
            # Masked, not multiplied by zero: that would keep non-finite values.
            low.masked_fill_(selection.foreign[:, :, None, None], 0)
        first = 0
        for part, size in enumerate(self._sizes):
            up = self._up[part][slots].flatten(0, 1)
            output[:, first : first + size].addmm_(low[:, :, part].flatten(1), up)
            first += size

    def put(self, slot: int, part: int, low: LowRankPair) -> None:
        """Fill an empty slot of a part."""
        rank = len(low.down)
        self._down[slot, part, :rank].copy_(low.down, non_blocking=True)
        self._up[part][slot, :rank].copy_(low.up, non_blocking=True)
        self._filled.add(slot)

    def matrices(self, slot: int, part: int) -> LowRankPair | None:
        """Return the matrices in a slot of a part, of the maximum rank; None if it is empty."""
        if slot not in self._filled:
            return None
        return LowRankPair(self._down[slot, part], self._up[part][slot])

    def clear(self, slot: int) -> None:
        """Empty a slot in all parts."""
        if slot in self._filled:
            self._down[slot].zero_()
            for up in self._up:
                up[slot].zero_()
            self._filled.remove(slot)


class LoraBank:
    """The adapter slots of all linear layers of a model.

    Attributes:
        slots: number of slots.
        rank: maximum rank of an adapter.
        selection: selection of the current forward pass, None for no adapter.
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
        *,
        invariant: bool = False,
    ) -> nn.Module:
        """Return a linear with adapter slots in place of `linear`.

        Args:
            linear: computes the product with the weights of all parts.
            weight: [size, I] of a part; adapters have its dtype and device.
            names: original names of the modules in this product, in order.
            sizes: outputs of each.
            kernels: compute adapters for few positions.
            invariant: they do so for any number of positions.
        """
        adapted = AdaptedLinear(linear, self, weight, sizes, kernels, invariant=invariant)
        self._places |= {name: (adapted, part) for part, name in enumerate(names)}
        return adapted

    def rename(self, old: str, new: str) -> None:
        """Put `new` in place of the beginning `old` of modules' names."""
        self._places = {
            f"{new}{name.removeprefix(old)}" if name.startswith(old) else name: place
            for name, place in self._places.items()
        }

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """(outputs, inputs) of each adaptable module, by name."""
        return {name: adapted.shape(part) for name, (adapted, part) in self._places.items()}

    @property
    def free(self) -> int:
        """Number of empty slots."""
        return len(self._free)

    @torch.inference_mode()
    def put(self, lows: Mapping[str, LowRankPair]) -> int:
        """Fill the first empty slot; return its number.

        Args:
            lows: matrices by module, of rank at most `rank`; other modules have no adapter.

        Raises:
            EngineError: no slot is empty, or a module does not exist.
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
        """Empty a slot that no sequence uses."""
        self._clear(slot)
        self._free = sorted([*self._free, slot])

    def _clear(self, slot: int) -> None:
        for adapted, _ in self._places.values():
            adapted.clear(slot)

    @contextmanager
    def selected(self, selection: Selection | None) -> Iterator[None]:
        """Use `selection` for forward passes within this context."""
        self.selection = selection
        try:
            yield
        finally:
            self.selection = None


def _zeros(shape: tuple[int, ...], like: Tensor) -> Tensor:
    """Return zeros with the dtype and device of another tensor.

    On a CPU, memory is not committed until it is written.
    """
    if like.device.type != "cpu":
        return torch.zeros(shape, dtype=like.dtype, device=like.device)
    memory = np.zeros(prod(shape) * like.dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(memory).view(like.dtype).view(shape)
