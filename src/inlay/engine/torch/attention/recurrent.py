"""Recurrent layers over pages: a page keeps the state after its last computed position.

A layer of the gated delta rule (Yang et al., "Gated Delta Networks", 2025) has, in place of keys
and values, one state that every position changes. A position needs the state of the one before it,
so to page groups, the prefix cache and preemption it is a layer with a window of two positions:
states at the ends of pages are found by their digests, and a prefix is continued at any of them.
Pages have to be large enough for a state, as in vLLM's hybrid cache.

Shapes: T positions in the step, B sequences, L positions of each, C hidden size, V value heads, K
and E elements of a key and of a value, D channels of the convolution and W its width.
"""

from collections.abc import Iterator
from itertools import accumulate
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.engine.torch.native.recurrent import DeltaRule, DeltaStep, delta_step
from inlay.engine.torch.transfers import upload

if TYPE_CHECKING:
    from inlay.engine.torch.attention.pages import Pages
    from inlay.engine.torch.batch import Batch

WINDOW = 2
"""A position needs its own page, and that of the position before it."""

_LAYERS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
"""transformers modules whose `forward` takes states from a cache, and gives it new ones."""


class Recurrence(Protocol):
    """Recurrent layers of one batch."""

    def compute(self, module: Any, hidden: Tensor) -> Tensor:
        """Compute a module of recurrent layers from the states in pages, and keep the new ones.

        Positions after the batch's own are padding: they are 0, and change no state.

        Args:
            module: transformers module.
            hidden: [1, T, C].

        Returns:
            [1, T, C].
        """
        ...


def keep_states(model: nn.Module) -> bool:
    """Let the recurrent layers of `model` compute with the argument `states`, a `Recurrence`.

    Returns True if there are any.
    """
    found = False
    for module in list[Any](model.modules()):
        if type(module).__name__ in _LAYERS:
            module.forward = MethodType(_compute, module)
            found = True
    return found


def _compute(module: Any, hidden_states: Tensor, states: Recurrence, **_: Any) -> Tensor:
    return states.compute(module, hidden_states)


def state_size(module: Any) -> int:
    """Return the float32 elements that the state of one sequence has in a layer."""
    return sum(shape.numel() for shape in _shapes(module))


def _shapes(module: Any) -> tuple[torch.Size, torch.Size]:
    """Return [V, K, E] of the rule's state, and [D, W - 1] of the inputs that are seen again."""
    rule = torch.Size((module.num_v_heads, module.head_k_dim, module.head_v_dim))
    return rule, torch.Size((module.conv_dim, module.conv_kernel_size - 1))


class _Run(NamedTuple):
    """Positions of B sequences, L of each, within one page of each.

    Attributes:
        rows: slice or [B * L] int64, indices of the positions in the batch.
        length: L.
        read: [page groups, B] int64, pages of the states before them; 0 for none.
        write: [page groups, B] int64, pages of the states after them.
    """

    rows: slice | Tensor
    length: int
    read: Tensor
    write: Tensor


class RecurrentStates:
    """A `Recurrence` over pages.

    Sequences with one position are computed together: natively on a CPU, or without a look at the
    device, so that a CUDA graph can hold them. The others are computed one after another, page by
    page.
    """

    def __init__(self, batch: "Batch", pages: "Pages", *, native: bool = True) -> None:
        """Find the pages of `batch`; `native` kernels are for tensors that are on a CPU."""
        self._pages = pages
        self._step = delta_step() if native and batch.slots.device.type == "cpu" else None
        self._runs = [*_single(batch, pages.page_size), *_several(batch, pages.page_size)]

    def compute(self, module: Any, hidden: Tensor) -> Tensor:
        """Compute as `Recurrence.compute`."""
        group = self._pages.groups[module.layer_idx]
        out = torch.zeros_like(hidden)
        for run in self._runs:
            inputs = hidden[0, run.rows].view(-1, run.length, hidden.shape[2])
            read, write = run.read[group], run.write[group]
            if run.length == 1 and self._step is not None and module.activation == "silu":
                found = self._natively(self._step, module, inputs, read, write)
            else:
                found = self._by_cache(module, inputs, read, write)
            out[0, run.rows] = found.flatten(0, 1)
        return out

    def _by_cache(self, module: Any, inputs: Tensor, read: Tensor, write: Tensor) -> Tensor:
        """Compute [B, L, C] to [B, L, C] by transformers' own code."""
        layer, shapes = module.layer_idx, _shapes(module)
        sizes = [shape.numel() for shape in shapes]
        rule, seen = torch.split(self._pages.read_states(layer, read, sum(sizes)), sizes, 1)
        cache = _LayerCache(
            rule.reshape(-1, *shapes[0]), seen.reshape(-1, *shapes[1]).to(inputs.dtype)
        )
        found: Tensor = type(module).forward(module, inputs, cache_params=cache)
        new = torch.cat((cache.rule.flatten(1).float(), cache.seen.flatten(1).float()), 1)
        self._pages.write_states(layer, write, new)
        return found

    def _natively(
        self, step: DeltaStep, module: Any, inputs: Tensor, read: Tensor, write: Tensor
    ) -> Tensor:
        """Compute [B, 1, C] to [B, 1, C] with states changed in place."""
        mixed, gate, strength, decay = _projected(module, inputs)
        found = step(
            DeltaRule(
                module.num_k_heads,
                module.num_v_heads,
                module.head_k_dim,
                module.head_v_dim,
                module.conv_kernel_size,
            ),
            self._pages.state_parts(module.layer_idx, state_size(module)),
            read.contiguous(),
            write.contiguous(),
            mixed.float().contiguous(),
            module.conv1d.weight[:, 0].float(),
            (-module.A_log.float().exp() * F.softplus(decay.float() + module.dt_bias))[:, 0],
            strength.float().sigmoid()[:, 0],
        )
        normed = module.norm(found.flatten(0, 1).to(inputs.dtype), gate.reshape(-1, gate.shape[-1]))
        projected: Tensor = module.out_proj(normed.view(len(inputs), 1, -1))
        return projected


def _projected(module: Any, inputs: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project [B, 1, C] to the convolution's channels [B, 1, D], gates, and b and a [B, 1, V]."""
    if hasattr(module, "in_proj_qkvz"):
        query, key, value, gate, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(inputs), module.in_proj_ba(inputs)
        )
        return torch.cat([part.flatten(2) for part in (query, key, value)], 2), gate, b, a
    mixed, gate = module.in_proj_qkv(inputs), module.in_proj_z(inputs)
    gate = gate.view(*gate.shape[:2], -1, module.head_v_dim)
    return mixed, gate, module.in_proj_b(inputs), module.in_proj_a(inputs)


def _single(batch: "Batch", size: int) -> Iterator[_Run]:
    """Yield the sequences with one position, if there are any, with pages of `size`."""
    spans = [span for span, count in enumerate(batch.counts) if count == 1]
    if not spans:
        return
    rows: slice | Tensor = slice(len(batch.positions))
    table = batch.block_table
    if len(spans) < len(batch.counts):
        firsts = list(accumulate(batch.counts, initial=0))
        rows = upload(torch.tensor([firsts[span] for span in spans]), table.device)
        table = table[:, upload(torch.tensor(spans), table.device)]
    positions = batch.positions[rows]
    pages = ((positions - 1).clamp_(min=0) // size)[None, :, None].expand(len(table), -1, 1)
    # The null page has the state of nothing, which is zero.
    read = table.gather(2, pages)[..., 0] * (positions > 0)
    yield _Run(rows, 1, read.long(), batch.slots[:, rows] // size)


def _several(batch: "Batch", size: int) -> Iterator[_Run]:
    """Yield the parts of the others that lie in one page each."""
    end = 0
    for span, count in enumerate(batch.counts):
        first, end = end, end + count
        start = batch.contexts[span] - count
        table = batch.block_table[:, span].long()
        at = start
        while count > 1 and at < start + count:
            stop = min((at // size + 1) * size, start + count)
            page, rows = at // size, slice(first + at - start, first + stop - start)
            before = table[:, (at - 1) // size, None] if at else torch.zeros_like(table[:, :1])
            yield _Run(rows, stop - at, before, table[:, page, None])
            at = stop


class _LayerCache:
    """Cache of one layer for one call, as transformers' modules use theirs.

    Attributes:
        rule: [B, V, K, E] float32.
        seen: [B, D, W - 1], inputs of the convolution before the next position.
    """

    def __init__(self, rule: Tensor, seen: Tensor) -> None:
        self.rule = rule
        self.seen = seen

    def get_conv_state(self, _: int, state_idx: int = 0) -> Tensor:
        """Return `seen`, which is changed in place where there is one position."""
        return self.seen

    def get_recurrent_state(self, _: int, state_idx: int = 0) -> Tensor:
        """Return `rule`."""
        return self.rule

    def is_recording_past(self, _: int) -> bool:
        """Return False: nothing is taken back."""
        return False

    def update_conv_state(self, new: Tensor, _: int, conv_kernel_size: int) -> Tensor:
        """Take inputs [B, D, L]; return those before them, and them."""
        both = torch.cat((self.seen, new), 2)
        self.seen = both[..., 1 - conv_kernel_size :]
        return both

    def update_recurrent_state(self, new: Tensor, _: int) -> None:
        """Take the state after the call."""
        self.rule = new


__all__ = ["WINDOW", "Recurrence", "RecurrentStates", "keep_states", "state_size"]
