"""Recurrent layers over pages: a page keeps the state after its last computed position.

A layer of the gated delta rule (Yang et al., "Gated Delta Networks", 2025) has, in place of keys
and values, one state that every position changes. A position needs the state of the one before it,
so to page groups, the prefix cache and preemption it is a layer with a window of two positions:
states at the ends of pages are found by their digests, and a prefix is continued at any of them.
Pages have to be large enough for a state, as in vLLM's hybrid cache.

Shapes: T positions in the step, B sequences, L positions of each, C hidden size, V value heads, K
and E elements of a key and of a value, D channels of the convolution and W its width.
"""

import sys
from collections.abc import Iterator, Sequence
from itertools import accumulate, zip_longest
from types import MethodType
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.native.recurrent import DeltaRule, delta_step
from inlay.engine.torch.transfers import upload

if TYPE_CHECKING:
    from inlay.engine.torch.batch import Batch

_SHORT = 16
"""Positions of a sequence from which on chunks by torch are faster than the native step."""

_LAYERS = frozenset({"Qwen3NextGatedDeltaNet", "Qwen3_5GatedDeltaNet", "Qwen3_5MoeGatedDeltaNet"})
"""transformers modules of the gated delta rule."""


class Recurrence(Protocol):
    """Recurrent layers of one batch."""

    def compute(self, module: Any, hidden: Tensor) -> Tensor:
        """Compute a module of recurrent layers, [1, T, C] to [1, T, C]; keep its states in pages.

        Positions after the batch's own are padding: they are 0, and change no state.
        """


def keep_states(model: nn.Module) -> bool:
    """Let the recurrent layers of `model` compute with the argument `states`, a `Recurrence`.

    Returns True if there are any. Raises `InvalidRequestError` for what is not supported.
    """
    found = False
    for module in list[Any](model.modules()):
        if type(module).__name__ in _LAYERS:
            if module.activation != "silu":
                raise InvalidRequestError(
                    f"recurrent layers have the activation silu; got {module.activation}"
                )
            if module.num_v_heads % module.num_k_heads:
                raise InvalidRequestError(
                    f"{module.num_v_heads} value heads of recurrent layers are no multiple of "
                    f"their {module.num_k_heads} key heads"
                )
            module.forward = MethodType(_compute, module)
            found = True
    return found


def _compute(module: Any, hidden_states: Tensor, states: Recurrence, **_: Any) -> Tensor:
    return states.compute(module, hidden_states)


class _PositionRun(NamedTuple):
    """Positions of B sequences, L of each, within one page of each if their states are kept.

    Attributes:
        rows: slice or [B * L] int64, indices of the positions.
        length: L.
        read: [page groups, B] int64, pages of the states before them; 0 for none.
        write: [page groups, B] int64, pages of the states after them; None to keep none.
    """

    rows: slice | Tensor
    length: int
    read: Tensor
    write: Tensor | None


class _RuleInputs(NamedTuple):
    """Inputs of a layer's rule at T positions.

    Attributes:
        channels: [T, D], of the convolution.
        decay: [T, V] float32, logarithms.
        strength: [T, V].
    """

    channels: Tensor
    decay: Tensor
    strength: Tensor

    def at(self, rows: slice | Tensor) -> "_RuleInputs":
        """Return those of some positions."""
        return _RuleInputs(self.channels[rows], self.decay[rows], self.strength[rows])


class RecurrentStates:
    """A `Recurrence` over pages.

    Sequences with one position are computed together: natively on a CPU, or without a look at the
    device, so that a CUDA graph can hold them. The others are computed one after another, page by
    page.

    Positions that may be computed again change no state. Their inputs are remembered, a few KB
    beside states of a megabyte, and computed once more when it is known which of them count.
    """

    def __init__(self, batch: "Batch", pages: Pages, *, native: bool = True) -> None:
        """Find the pages of `batch`; `native` kernels are for tensors that are on a CPU."""
        self._pages = pages
        self._batch = batch
        self._step = delta_step() if native and batch.slots.device.type == "cpu" else None
        self._runs = [*_single(batch, pages.page_size), *_several(batch, pages.page_size)]
        ends = accumulate(batch.counts)
        found = [
            row
            for end, count in zip(ends, batch.uncertain, strict=False)
            for row in range(end - count, end)
        ]
        self._uncertain = upload(torch.tensor(found), batch.slots.device) if found else None
        self._trials = list(_uncertain(batch, pages.page_size, batch.uncertain, keep=False))
        self._inputs: dict[Any, _RuleInputs] = {}

    def compute(self, module: Any, hidden: Tensor) -> Tensor:
        """Compute as `Recurrence.compute`."""
        rule = DeltaRule.of(module)
        channels, gate, strength, decay = _projected(module, hidden)
        inputs = _RuleInputs(channels, decay, strength)
        found = hidden.new_zeros(hidden.shape[1], rule.value_heads, rule.value_size)
        for run in self._runs:
            found[run.rows] = self._advance(module, run, inputs.at(run.rows))
        if self._uncertain is not None:
            self._inputs[module] = inputs = inputs.at(self._uncertain)
            tried = found[self._uncertain]
            for run in self._trials:
                tried[run.rows] = self._advance(module, run, inputs.at(run.rows))
            found[self._uncertain] = tried
        normed: Tensor = module.norm(found.flatten(0, 1), gate.reshape(-1, rule.value_size))
        projected: Tensor = module.out_proj(normed.view(1, hidden.shape[1], -1))
        return projected

    def commit_recurrent_state(self, kept: Sequence[int]) -> None:
        """Keep the states after the first `kept` uncertain positions of each chunk."""
        runs = list(_uncertain(self._batch, self._pages.page_size, kept, keep=True))
        for module, inputs in self._inputs.items():
            for run in runs:
                self._advance(module, run, inputs.at(run.rows))

    def _advance(self, module: Any, run: _PositionRun, inputs: _RuleInputs) -> Tensor:
        """Compute the positions of `run` from its inputs: [B * L, V, E]."""
        group = self._pages.groups[module.layer_idx]
        read, write = run.read[group], None if run.write is None else run.write[group]
        if self._step is None or run.length > _SHORT:
            return self._by_torch(module, run.length, *inputs, read, write)
        channels, decay, strength = (each.float().contiguous() for each in inputs)
        return self._step(
            DeltaRule.of(module),
            self._pages.states[module.layer_idx],
            read.contiguous(),
            None if write is None else write.contiguous(),
            channels,
            module.conv1d.weight[:, 0].float(),
            decay,
            strength,
        ).to(inputs.channels.dtype)

    def _by_torch(
        self,
        module: Any,
        length: int,
        channels: Tensor,
        decay: Tensor,
        strength: Tensor,
        read: Tensor,
        write: Tensor | None,
    ) -> Tensor:
        """Compute [B * L, D], [B * L, V] twice to [B * L, V, E], by the rules of transformers."""
        layer, rule = module.layer_idx, DeltaRule.of(module)
        sizes = [rule.state_size - rule.channels * (rule.width - 1)]
        sizes.append(rule.state_size - sizes[0])
        state, seen = torch.split(self._pages.read_states(layer, read), sizes, 1)
        new = channels.view(-1, length, rule.channels).transpose(1, 2)
        inputs = torch.cat((seen.reshape(len(new), rule.channels, -1).to(new.dtype), new), 2)
        mixed = F.silu(F.conv1d(inputs, module.conv1d.weight, groups=rule.channels))
        keys = rule.key_heads * rule.key_size
        parts = [keys, keys, rule.channels - 2 * keys]
        query, key, value = torch.split(mixed.transpose(1, 2), parts, 2)
        modeling: Any = sys.modules[type(module).__module__]
        chunks = modeling.torch_chunk_gated_delta_rule
        found, state = (chunks if length > 1 else modeling.torch_recurrent_gated_delta_rule)(
            query.reshape(-1, length, rule.key_heads, rule.key_size),
            key.reshape(-1, length, rule.key_heads, rule.key_size),
            value.reshape(-1, length, rule.value_heads, rule.value_size),
            g=decay.view(-1, length, rule.value_heads),
            beta=strength.view(-1, length, rule.value_heads),
            initial_state=state.reshape(-1, rule.value_heads, rule.key_size, rule.value_size),
            output_final_state=True,
            use_qk_l2norm_in_kernel=True,
        )
        if write is not None:
            seen = inputs[..., inputs.shape[2] - rule.width + 1 :]
            states = torch.cat((state.flatten(1).float(), seen.flatten(1).float()), 1)
            self._pages.write_states(layer, write, states)
        outputs: Tensor = found.flatten(0, 1)
        return outputs


def _projected(module: Any, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Project [1, T, C] to channels of the convolution, gates, strengths and decays.

    Returns [T, D], [T, V, E], [T, V] and float32 [T, V], logarithms.
    """
    if hasattr(module, "in_proj_qkvz"):
        query, key, value, gate, b, a = module.fix_query_key_value_ordering(
            module.in_proj_qkvz(hidden), module.in_proj_ba(hidden)
        )
        channels = torch.cat([part.flatten(2) for part in (query, key, value)], 2)
    else:
        channels, gate = module.in_proj_qkv(hidden), module.in_proj_z(hidden)
        b, a = module.in_proj_b(hidden), module.in_proj_a(hidden)
    decay = -module.A_log.float().exp() * F.softplus(a[0].float() + module.dt_bias)
    return channels[0], gate[0], b[0].sigmoid(), decay


def _certain(batch: "Batch") -> list[int]:
    """Return how many positions of each chunk are not computed again."""
    return [
        count - again for count, again in zip_longest(batch.counts, batch.uncertain, fillvalue=0)
    ]


def _single(batch: "Batch", size: int) -> Iterator[_PositionRun]:
    """Yield the chunks with one certain position, if there are any, with pages of `size`."""
    chunks = [chunk for chunk, count in enumerate(_certain(batch)) if count == 1]
    if not chunks:
        return
    rows: slice | Tensor = slice(len(batch.positions))
    table = batch.block_table
    if len(chunks) < len(batch.positions):
        firsts = list(accumulate(batch.counts, initial=0))
        rows = upload(torch.tensor([firsts[chunk] for chunk in chunks]), table.device)
        table = table[:, upload(torch.tensor(chunks), table.device)]
    positions = batch.positions[rows]
    pages = ((positions - 1).clamp_(min=0) // size)[None, :, None].expand(len(table), -1, 1)
    # The null page has the state of nothing, which is zero.
    read = table.gather(2, pages)[..., 0] * (positions > 0)
    yield _PositionRun(rows, 1, read.long(), batch.slots[:, rows] // size)


def _several(batch: "Batch", size: int) -> Iterator[_PositionRun]:
    """Yield the certain parts of the others, divided by pages."""
    first = 0
    for chunk, (count, certain) in enumerate(zip(batch.counts, _certain(batch), strict=True)):
        start = batch.contexts[chunk] - count
        for at, stop in _by_page(start, start + certain, size) if certain > 1 else ():
            rows = slice(first + at - start, first + stop - start)
            yield _PositionRun(rows, stop - at, *_pages_of(batch, [(chunk, at)], size))
        first += count


def _uncertain(
    batch: "Batch", size: int, counts: Sequence[int], *, keep: bool
) -> Iterator[_PositionRun]:
    """Yield the first `counts` uncertain positions of each chunk, equally many of some together.

    Rows are numbers among uncertain positions. Those whose states are kept are divided by pages.
    """
    turns: dict[tuple[int, int], list[tuple[int, int, int]]] = {}
    first = 0
    for chunk, (again, count) in enumerate(zip(batch.uncertain, counts, strict=True)):
        start = batch.contexts[chunk] - again
        parts = _by_page(start, start + count, size) if keep else [(start, start + count)]
        for turn, (at, stop) in enumerate(parts if count else ()):
            found = turns.setdefault((turn, stop - at), [])
            found.append((chunk, at, first + at - start))
        first += again
    # A sequence's second part begins with the state after its first.
    for (_, length), members in sorted(turns.items()):
        rows = torch.tensor([row + place for _, _, row in members for place in range(length)])
        read, write = _pages_of(batch, [(chunk, at) for chunk, at, _ in members], size)
        yield _PositionRun(upload(rows, batch.slots.device), length, read, write if keep else None)


def _by_page(start: int, stop: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the bounds of the parts of positions `start` to `stop` that lie in one page each."""
    while start < stop:
        end = min((start // size + 1) * size, stop)
        yield start, end
        start = end


def _pages_of(
    batch: "Batch", places: Sequence[tuple[int, int]], size: int
) -> tuple[Tensor, Tensor]:
    """Return the pages of the position before each (chunk, position), 0 for none, and of its own.

    Both [page groups, B] int64.
    """
    table = batch.block_table
    chunks, positions = upload(torch.tensor(places), table.device).T
    before = table[:, chunks, (positions - 1).clamp(min=0) // size] * (positions > 0)
    return before.long(), table[:, chunks, positions // size].long()
