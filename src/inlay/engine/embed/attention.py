"""Attention over sequences laid end to end, behind transformers' attention interface.

All other layers treat each position independently, so only attention would need padding. Sequences
of about the same length are attended together: equal lengths in place, others after a copy that
pads them to the longest of their group. Short products merge, and little work is wasted.

A forward pass gets its `PackedAttention` as a keyword argument, which transformers passes to every
attention layer.
"""

from collections.abc import Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import AttentionInterface

from inlay.base.errors import EngineError
from inlay.engine.embed.relative_bias import RelativeBias
from inlay.engine.torch.attention.chunks import Temperature
from inlay.engine.torch.attention.paged import check_options
from inlay.engine.torch.windows import Chunk, Window, size_of

IMPLEMENTATION = "inlay_packed"
"""Name of this attention in transformers."""

_ALIKE = 0.8
"""Minimal ratio of the shortest to the longest length in a group."""

_ALONE = 32
"""Sequences at least this long are not padded to another's length."""

_WITHOUT_EFFECT = frozenset(
    {
        "deterministic",
        "dropout",
        "is_causal",
        "output_attentions",
        "past_key_values",
        "position_ids",
        "use_cache",
    }
)
"""Keyword arguments of attention layers that have no effect on the result here."""


class _SequenceGroup(NamedTuple):
    """Sequences that are attended together.

    Attributes:
        start: first position in the batch.
        stop: position after the last.
        sequences: number of sequences.
        longest: length of the longest.
        gather: [sequences * longest], positions in the batch; padding repeats the sequence's own
            first position, so that non-finite values stay within their sequence. None if all are
            equally long.
        scatter: [stop - start], index of each position in the padded result.
        keys: bool [sequences, 1, 1, longest], false for keys that are padding or not seen; None if
            there are none.
    """

    start: int
    stop: int
    sequences: int
    longest: int
    gather: Tensor | None
    scatter: Tensor | None
    keys: Tensor | None


class PackedAttention:
    """Attention of one batch.

    Args:
        lengths: lengths of the sequences in batch order; should be descending, for good groups.
        device: device of the batch.
        atomic: bounds, in the batch, of segments whose positions see all of their segment.
        narrowed: sliding windows are smaller by so many positions.
        visible: of each sequence, the first positions that others see; None: all. Where attention
            is not causal.

    Attributes:
        lengths: as given.
    """

    def __init__(
        self,
        lengths: Sequence[int],
        device: torch.device,
        atomic: Sequence[tuple[int, int]] = (),
        narrowed: int = 0,
        visible: Sequence[int] | None = None,
    ) -> None:
        self.lengths = lengths
        self._visible = lengths if visible is None else visible
        self._narrowed = narrowed
        self._windows: dict[tuple[int, Window], Tensor] = {}
        self._with_segments: dict[tuple[int, Window], Tensor] = {}
        self._biases: dict[int, Tensor] = {}
        self._device = device
        self._segment: Tensor | None = None
        if atomic:
            # The number of each position's segment; 0 of those that are in none.
            self._segment = torch.zeros(sum(lengths), dtype=torch.int32, device=device)
            for number, (start, stop) in enumerate(atomic, 1):
                self._segment[start:stop] = number

    @cached_property
    def _groups(self) -> list[_SequenceGroup]:
        groups: list[_SequenceGroup] = []
        lengths = self.lengths
        start = 0
        while start < len(lengths):
            # A long sequence is efficient alone, and padding it would cost a copy.
            least = lengths[start] * (1 if lengths[start] >= _ALONE else _ALIKE)
            stop = next((n for n in range(start, len(lengths)) if lengths[n] < least), len(lengths))
            first = groups[-1].stop if groups else 0
            seen = self._visible[start:stop]
            groups.append(_group(lengths[start:stop], seen, first, self._device))
            start = stop
        return groups

    def attend(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        *,
        scaling: float,
        causal: bool,
        window: Window,
        bias: RelativeBias | None = None,
    ) -> Tensor:
        """Attend within each sequence.

        Args:
            query: [Q, T, D].
            key: [H, T, D]; Q is a multiple of H.
            value: [H, T, E].
            scaling: factor of the scores.
            causal: each position sees only itself and earlier ones.
            window: a position sees those at a distance below `window`, or those of its chunk; None
                for all.
            bias: added to the scores, of layers that all have the same, and no window.

        Returns:
            [T, Q, E].
        """
        if isinstance(window, int):
            window -= self._narrowed
        query, key, value = (tensor.transpose(0, 1) for tensor in (query, key, value))
        out = query.new_empty(query.shape[0], query.shape[1], value.shape[2])
        for group in self._groups:
            queries, keys, values = (_taken(tensor, group) for tensor in (query, key, value))
            longest = group.longest
            mask = group.keys
            size = size_of(window)
            local = None if size is None or longest <= size else window
            if bias is not None:
                mask = self._biased(group, bias)
            elif causal and self._segment is not None:
                mask = self._with_atomic(group, self._segment, local)
            elif local is not None:
                near = self._near(longest, local, causal=causal)
                mask = near if mask is None or causal else mask & near
            elif causal:
                # Padding is at the end, where causal attention does not look.
                mask = None
            states = F.scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=mask,
                is_causal=causal and mask is None,
                scale=scaling,
                enable_gqa=queries.shape[1] != keys.shape[1],
            )
            flat = states.transpose(1, 2).reshape(group.sequences * longest, *out.shape[1:])
            if group.scatter is None:
                out[group.start : group.stop] = flat
            else:
                torch.index_select(flat, 0, group.scatter, out=out[group.start : group.stop])
        return out

    def _near(self, length: int, window: Window, *, causal: bool) -> Tensor:
        """Return booleans [length, length], true where the row's position sees the column's."""
        found = self._windows.get((length, window))
        if found is None:
            places = torch.arange(length, device=self._device)
            away = places[:, None] - places
            if isinstance(window, Chunk):
                chunks = places // window.size
                found = (chunks[:, None] == chunks) & (away >= 0)
            elif window is None:
                found = away >= 0
            else:
                found = (away < window) & ((away >= 0) if causal else (away > -window))
            self._windows[length, window] = found
        return found

    def _biased(self, group: _SequenceGroup, bias: RelativeBias) -> Tensor:
        """Return what a group adds to scores [sequences or 1, Q, longest, longest]."""
        if group.start not in self._biases:
            added = bias.of(group.longest)[None]
            if group.keys is not None:
                added = added.masked_fill(~group.keys, -torch.inf)
            self._biases[group.start] = added
        return self._biases[group.start]

    def _with_atomic(self, group: _SequenceGroup, segment: Tensor, window: Window) -> Tensor:
        """Return booleans [sequences, 1, longest, longest] of a group with atomic segments."""
        key = group.start, window
        if key not in self._with_segments:
            near = self._near(group.longest, window, causal=True)
            places = slice(group.start, group.stop) if group.gather is None else group.gather
            own = segment[places].view(group.sequences, 1, group.longest, 1)
            if group.keys is not None:
                own = own * group.keys.transpose(-1, -2)
            self._with_segments[key] = near | ((own == own.transpose(-1, -2)) & (own > 0))
        return self._with_segments[key]


def _group(
    lengths: Sequence[int], visible: Sequence[int], start: int, device: torch.device
) -> _SequenceGroup:
    longest, total = max(lengths), sum(lengths)
    stop = start + total
    places = torch.arange(longest)
    keys = None
    if min(visible) < longest:
        keys = (places < torch.tensor(visible)[:, None])[:, None, None].to(device)
    if min(lengths) == longest:
        return _SequenceGroup(start, stop, len(lengths), longest, None, None, keys)
    counts = torch.tensor(lengths)
    firsts = torch.tensor(list(accumulate(lengths[:-1], initial=start)))
    real = places < counts[:, None]
    gather = torch.where(real, firsts[:, None] + places, firsts[:, None])
    scatter = torch.nonzero(real.flatten()).flatten()
    return _SequenceGroup(
        start,
        stop,
        len(lengths),
        longest,
        gather.flatten().to(device),
        scatter.to(device),
        keys,
    )


def _taken(tensor: Tensor, group: _SequenceGroup) -> Tensor:
    """Return a group's part of [T, N, D] as [sequences, N, longest, D]."""
    part = tensor[group.start : group.stop] if group.gather is None else tensor[group.gather]
    return part.reshape(group.sequences, group.longest, *tensor.shape[1:]).transpose(1, 2)


def _packed_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    packed: PackedAttention | None = None,
    places: Tensor | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """Attention function for transformers.

    Query [1, Q, T, D], key [1, H, T, D], value [1, H, T, E]; `places` [1, T], positions of the
    queries in their sequences.

    Returns [1, T, Q, E].

    Raises:
        EngineError: an unsupported option that would change the result.
    """
    if packed is None:
        raise EngineError(f"{IMPLEMENTATION} attention runs inside the embedding engine only")
    check_options(module, {"attention_mask": attention_mask, **options}, _WITHOUT_EFFECT)
    temperature: Temperature | None = getattr(module, "temperature", None)
    if temperature is not None and places is not None:
        query = temperature.of(query, places)
    states = packed.attend(
        query[0],
        key[0],
        value[0],
        scaling=query.shape[-1] ** -0.5 if scaling is None else scaling,
        causal=bool(_causal(module)),
        window=getattr(module, "chunk", sliding_window),
    )
    return states[None], None


def _causal(module: Any) -> bool:
    found: bool = module.is_causal
    return found


AttentionInterface.register(IMPLEMENTATION, _packed_attention)
