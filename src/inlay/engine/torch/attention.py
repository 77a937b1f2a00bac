"""Paged attention behind transformers' attention interface.

A forward pass gets a `PagedAttention` for its batch as a keyword argument, which transformers hands to every attention
layer; nothing about a request lives in a module or a global.

On a CPU, scores are formed by batched matrix products over gathered pages, the queries of a group of heads folded into
rows: torch's fused attention is two to three times slower there, for one query and for many. On CUDA,
`torch.nn.attention.varlen.varlen_attn` reads the pages through a block table.

Shapes: T positions in the step, Q query heads, H key/value heads, G = Q / H, D head size, B sequences in a group,
N pages, P positions a page, L gathered positions.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple, Protocol, cast

import torch
from torch import Tensor, nn
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from inlay.engine.torch.batch import Batch
from inlay.engine.torch.pages import Pages
from inlay.errors import EngineError

IMPLEMENTATION = "inlay_paged"
"""The name transformers knows this attention by."""

_GROUP_BYTES = 1 << 20
"""Keys of sequences that decode together at most: gathered keys and values should stay in a core's cache."""

_SCORE_BYTES = 1 << 21
"""Scores of one block of a prompt's queries, roughly at most, for the same reason."""

_NOT_OPTIONS = frozenset({"dropout", "is_causal", "position_ids", "use_cache", "past_key_values"})
"""Keyword arguments of attention layers that do not change the result here."""


class PagedAttention(Protocol):
    """Attention over the pages, for one batch."""

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """Store the batch's keys and values, then attend causally to each sequence's own positions.

        Args:
            layer: whose pages.
            query: [Q, T, D].
            key: [H, T, D].
            value: [H, T, D].
            scaling: factor of the scores.
            window: a position sees itself and the `window - 1` before it; None for all before it.

        Returns:
            [T, Q, D].
        """
        ...


def attention(
    batch: Batch, pages: Pages, workspace: "Workspace", *, float32_scores: bool = False
) -> PagedAttention:
    """The attention of `batch` on the device its pages are on.

    Args:
        batch: what is computed.
        pages: where keys and values are.
        workspace: memory that later batches use again.
        float32_scores: on a CPU, keep scores in float32 whatever the activations' dtype is.
    """
    if pages.keys[0].device.type == "cpu":
        return CpuAttention(batch, pages, workspace, float32_scores=float32_scores)
    return VarlenAttention(batch, pages)


class Workspace:
    """Two buffers that only grow, for gathered keys and values: fresh memory would cost more than the attention."""

    __slots__ = ("_buffers",)

    def __init__(self) -> None:
        self._buffers = (torch.empty(0), torch.empty(0))

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Two tensors of `shape`, content undefined, valid until the next call."""
        size = 1
        for length in shape:
            size *= length
        if self._buffers[0].numel() < size or self._buffers[0].dtype != dtype:
            self._buffers = (torch.empty(size, dtype=dtype), torch.empty(size, dtype=dtype))
        return self._buffers[0][:size].view(shape), self._buffers[1][:size].view(shape)


class _Group(NamedTuple):
    """Sequences that compute one position each, attended to together.

    Attributes:
        rows: [B] int64, their positions in the batch.
        pages: [B * L / P] int64, what to gather.
        first: where B is 1, the first gathered position to look at.
        length: where B is 1, past the last one; exact bounds need no masking.
        hidden: [B, 1, L] bool, what a sequence must not see, or None.
        stale: [number hidden] int64, the same positions in B * L.
    """

    rows: Tensor
    pages: Tensor
    first: int
    length: int
    hidden: Tensor | None
    stale: Tensor | None


class _Prefill(NamedTuple):
    """A sequence that computes several positions: its place in the batch, its pages, its blocks of queries."""

    first: int
    pages: Tensor
    blocks: tuple["_Block", ...]


class _Block(NamedTuple):
    """Queries [start, stop) of a stretch, which see keys [low, high) of the sequence except where `hidden`.

    Attributes:
        hidden: [stop - start, high - low] bool, or [stop - start, stop - start] for the last keys alone.
    """

    start: int
    stop: int
    low: int
    high: int
    hidden: Tensor


class CpuAttention:
    """Batched matrix products over gathered pages.

    In bfloat16 a score is rounded to bfloat16 before the softmax, as in transformers' eager attention; `float32_scores`
    avoids it for models whose scores are large.
    """

    def __init__(
        self, batch: Batch, pages: Pages, workspace: Workspace, *, float32_scores: bool = False
    ) -> None:
        self._batch = batch
        self._pages = pages
        self._workspace = workspace
        self._float32_scores = float32_scores
        self._plans: dict[tuple[int | None, int], tuple[list[_Group], list[_Prefill]]] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """As `PagedAttention.attend`."""
        self._pages.write(layer, self._batch.slots, key, value)
        plan = self._plans.get((window, query.shape[0]))
        if plan is None:
            plan = self._plan(window, query)
            self._plans[window, query.shape[0]] = plan
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        for group in plan[0]:
            self._decode(group, layer, query, scaling, out)
        for prefill in plan[1]:
            self._prefill(prefill, layer, query, scaling, out)
        return out

    def _decode(self, group: _Group, layer: int, query: Tensor, scaling: float, out: Tensor) -> None:
        keys, values = self._gather(group.pages, layer)
        num_heads, size = keys.shape[0], keys.shape[3]
        num_rows = len(group.rows)
        folded = (num_heads * num_rows, query.shape[0] // num_heads, size)
        keys = keys.view(folded[0], -1, size)
        values = values.view(folded[0], -1, size)
        if group.stale is None:
            keys = keys[:, group.first : group.length]
            values = values[:, group.first : group.length]
        else:
            # Zero times a stale NaN would be NaN.
            values.view(num_heads, -1, size).index_fill_(1, group.stale, 0)
        queries = query.index_select(1, group.rows)
        queries = queries.reshape(num_heads, -1, num_rows, size).transpose(1, 2).reshape(folded)
        scores = self._scores(queries, keys, scaling)
        if group.hidden is not None:
            scores.view(num_heads, num_rows, *scores.shape[1:]).masked_fill_(group.hidden, float("-inf"))
        found = torch.bmm(torch.softmax(scores, -1).to(values.dtype), values)
        found = found.view(num_heads, num_rows, -1, size).transpose(0, 1).flatten(1, 2)
        out.index_copy_(0, group.rows, found)

    def _prefill(self, prefill: _Prefill, layer: int, query: Tensor, scaling: float, out: Tensor) -> None:
        keys, values = self._gather(prefill.pages, layer)
        num_heads, size = keys.shape[0], keys.shape[3]
        keys, values = keys.view(num_heads, -1, size), values.view(num_heads, -1, size)
        for start, stop, low, high, hidden in prefill.blocks:
            first, count = prefill.first + start, stop - start
            queries = query[:, first : first + count].reshape(num_heads, -1, size)
            scores = self._scores(queries, keys[:, low:high], scaling)
            seen = scores.view(num_heads, -1, count, high - low)
            seen[..., -hidden.shape[1] :].masked_fill_(hidden, float("-inf"))
            found = torch.bmm(torch.softmax(scores, -1).to(values.dtype), values[:, low:high])
            out[first : first + count] = found.view(query.shape[0], count, size).transpose(0, 1)

    def _gather(self, index: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Keys and values of some pages, [H, number of pages, P, D]; valid until the next call."""
        keys, values = self._pages.keys[layer], self._pages.values[layer]
        num_heads, _, page_size, size = keys.shape
        into = self._workspace.take((num_heads, len(index), page_size, size), keys.dtype)
        torch.index_select(keys, 1, index, out=into[0])
        torch.index_select(values, 1, index, out=into[1])
        return into

    def _scores(self, queries: Tensor, keys: Tensor, scaling: float) -> Tensor:
        """Scaled scores, [..., number of queries, number of keys]."""
        if self._float32_scores:
            queries, keys = queries.float(), keys.float()
        return torch.baddbmm(queries.new_empty(()), queries, keys.transpose(1, 2), beta=0, alpha=scaling)

    def _plan(self, window: int | None, query: Tensor) -> tuple[list[_Group], list[_Prefill]]:
        decodes: list[tuple[int, int, int]] = []
        prefills: list[_Prefill] = []
        first = 0
        for span, (count, context) in enumerate(zip(self._batch.counts, self._batch.contexts, strict=True)):
            if count == 1:
                decodes.append((context, span, first))
            else:
                table = self._batch.block_table[span]
                prefills.append(
                    _Prefill(
                        first,
                        table[: -(-context // self._pages.page_size)].long(),
                        tuple(_blocks(count, context, window, query.shape[0] * query.element_size())),
                    )
                )
            first += count
        return list(self._groups(decodes, window)), prefills

    def _groups(self, decodes: list[tuple[int, int, int]], window: int | None) -> Iterator[_Group]:
        """Group (context, span, position in the batch) by similar length, within `_GROUP_BYTES`."""
        keys = self._pages.keys[0]
        page_bytes = keys.element_size() * keys.shape[0] * keys.shape[2] * keys.shape[3]
        members: list[tuple[int, int, int]] = []
        longest = 0
        for member in sorted(decodes, reverse=True):
            length = self._num_pages(member[0], window)
            full = (len(members) + 1) * longest * page_bytes > _GROUP_BYTES
            if members and (full or 2 * length < longest):
                yield self._group(members, longest, window)
                members = []
            if not members:
                longest = length
            members.append(member)
        if members:
            yield self._group(members, longest, window)

    def _num_pages(self, context: int, window: int | None) -> int:
        size = self._pages.page_size
        return -(-context // size) - _low(context, window) // size

    def _group(self, members: list[tuple[int, int, int]], longest: int, window: int | None) -> _Group:
        size = self._pages.page_size
        rows = torch.tensor([row for _, _, row in members])
        if len(members) == 1:
            context, span, _ = members[0]
            low = _low(context, window)
            start = low // size
            index = self._batch.block_table[span, start : start + longest].long()
            return _Group(rows, index, low - start * size, context - start * size, None, None)
        spans = torch.tensor([span for _, span, _ in members])
        contexts = torch.tensor([context for context, _, _ in members])
        lows = torch.tensor([_low(context, window) for context, _, _ in members])
        starts = lows // size
        # A shorter sequence gathers some page again in place of what it lacks; all of that is hidden.
        columns = (starts[:, None] + torch.arange(longest)).clamp_(max=self._batch.block_table.shape[1] - 1)
        index = self._batch.block_table[spans[:, None], columns].long().flatten()
        places = starts[:, None] * size + torch.arange(longest * size)
        hidden = (places < lows[:, None]) | (places >= contexts[:, None])
        stale = hidden.flatten().nonzero().squeeze(1)
        return _Group(rows, index, 0, 0, hidden[:, None], stale)


def _low(context: int, window: int | None) -> int:
    """The first position the last of `context` positions sees."""
    return 0 if window is None else max(0, context - window)


def _blocks(count: int, context: int, window: int | None, position_bytes: int) -> Iterator[_Block]:
    """Cut a stretch of `count` positions that ends at `context` into blocks of queries.

    Args:
        count: positions computed.
        context: positions of the sequence up to and with the last of them.
        window: as for `PagedAttention.attend`.
        position_bytes: bytes of all heads' scores of one query for one key.
    """
    before = context - count
    step = min(256, max(16, _SCORE_BYTES // (position_bytes * context)))
    for start in range(0, count, step):
        stop = min(count, start + step)
        high = before + stop
        low = _low(before + start + 1, window)
        if window is None or high <= window:
            hidden = torch.ones(stop - start, stop - start, dtype=torch.bool).triu_(1)
        else:
            distance = torch.arange(before + start, high)[:, None] - torch.arange(low, high)
            hidden = (distance < 0) | (distance >= window)
        yield _Block(start, stop, low, high, hidden)


class VarlenAttention:
    """Flash attention over the pages by block table. Written from torch's documentation; not yet run on a GPU."""

    def __init__(self, batch: Batch, pages: Pages) -> None:
        device = batch.slots.device
        counts = torch.tensor((0, *batch.counts), dtype=torch.int32)
        self._batch = batch
        self._pages = pages
        self._starts = counts.cumsum(0, dtype=torch.int32).to(device)
        self._lengths = torch.tensor(batch.contexts, dtype=torch.int32).to(device)

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scaling: float,
        window: int | None,
    ) -> Tensor:
        """As `PagedAttention.attend`."""
        self._pages.write(layer, self._batch.slots, key, value)
        return cast("Tensor", varlen_attn(**self.arguments(layer, query, scaling, window)))

    def arguments(self, layer: int, query: Tensor, scaling: float, window: int | None) -> dict[str, Any]:
        """What `varlen_attn` is called with: causal is the window (-1, 0), pages are [N, P, H, D]."""
        return {
            "query": query.transpose(0, 1),
            "key": self._pages.keys[layer].permute(1, 2, 0, 3),
            "value": self._pages.values[layer].permute(1, 2, 0, 3),
            "cu_seq_q": self._starts,
            "cu_seq_k": None,
            "max_q": max(self._batch.counts),
            "max_k": max(self._batch.contexts),
            "scale": scaling,
            "window_size": (-1 if window is None else window - 1, 0),
            "enable_gqa": query.shape[0] != key_heads(self._pages),
            "seqused_k": self._lengths,
            "block_table": self._batch.block_table,
        }


def key_heads(pages: Pages) -> int:
    """Key/value heads of the pages."""
    return pages.keys[0].shape[0]


def _paged_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    paged: PagedAttention | None = None,
    **options: object,
) -> tuple[Tensor, None]:
    """What transformers calls: query [1, Q, T, D], key and value [1, H, T, D]; returns [1, T, Q, D].

    Raises:
        EngineError: an option that would change the result and is not honoured here.
    """
    if paged is None:
        raise EngineError(f"{IMPLEMENTATION} attention runs inside the torch engine only")
    dropped = [name for name, option in options.items() if option is not None and name not in _NOT_OPTIONS]
    if dropped or attention_mask is not None:
        names = ", ".join(sorted([*dropped, *([] if attention_mask is None else ["attention_mask"])]))
        raise EngineError(f"{type(module).__name__} asks for {names}, which this attention does not do")
    factor = query.shape[-1] ** -0.5 if scaling is None else scaling
    layer: Any = module.layer_idx
    return paged.attend(layer, query[0], key[0], value[0], factor, sliding_window)[None], None


AttentionInterface.register(IMPLEMENTATION, _paged_attention)
