"""Paged attention behind transformers' attention interface.

A forward pass gets a `PagedAttention` for its batch as a keyword argument, which transformers hands to every attention
layer; nothing about a request lives in a module or a global.

On a CPU, scores are formed by batched matrix products over gathered pages, the queries of a group of heads folded into
rows: torch's fused attention is two to three times slower there, for one query and for many. On CUDA,
`torch.nn.attention.varlen.varlen_attn` reads the pages through a block table.

Shapes: T positions in the step, Q query heads, H key/value heads, G = Q / H, D head size, B sequences in a
group, C queries and L gathered positions of each, N pages, P positions a page.
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

_MIN_BLOCK, _MAX_BLOCK = 16, 256
"""Queries in such a block."""

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

        Positions after the batch's own are padding, which is neither stored nor seen.

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
    """B sequences with C queries each, attended to in one product over whole pages.

    Whole pages, because a product over a slice of the gathered keys would first copy them, transposed.

    Attributes:
        rows: [B * C] int64, the queries' positions in the batch.
        pages: [B * L / P] int64, what to gather.
        num_sequences: B.
        hidden: [B, 1, C, up to L] bool, which of the last gathered positions a query must not see.
        stale: int64, positions in B * L whose content is not the sequence's.
    """

    rows: Tensor
    pages: Tensor
    num_sequences: int
    hidden: Tensor
    stale: Tensor


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
        self._plans: dict[int | None, list[_Group]] = {}

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
        count = len(self._batch.slots)
        self._pages.write(layer, self._batch.slots, key[:, :count], value[:, :count])
        groups = self._plans.get(window)
        if groups is None:
            groups = self._plans[window] = list(self._plan(window, query))
        out = query.new_empty(query.shape[1], query.shape[0], query.shape[2])
        out[count:] = 0
        for group in groups:
            self._attend(group, layer, query, scaling, out)
        return out

    def _attend(self, group: _Group, layer: int, query: Tensor, scaling: float, out: Tensor) -> None:
        keys, values = self._gather(group.pages, layer)
        num_heads, size = keys.shape[0], keys.shape[3]
        # Zero times a stale NaN would be NaN.
        values.view(num_heads, -1, size).index_fill_(1, group.stale, 0)
        folded = (num_heads * group.num_sequences, -1, size)
        # [H, G, B, C, D] to [H, B, G, C, D]: the queries of a group of heads are rows of one product.
        apart = (num_heads, query.shape[0] // num_heads, group.num_sequences, -1, size)
        queries = query.index_select(1, group.rows).reshape(apart).transpose(1, 2).reshape(folded)
        scores = self._scores(queries, keys.view(folded), scaling)
        seen = scores.view(num_heads, group.num_sequences, apart[1], -1, scores.shape[-1])
        seen[..., -group.hidden.shape[-1] :].masked_fill_(group.hidden.unsqueeze(0), float("-inf"))
        found = torch.bmm(torch.softmax(scores, -1).to(values.dtype), values.view(folded))
        found = found.view(num_heads, group.num_sequences, apart[1], -1, size)
        out.index_copy_(0, group.rows, found.permute(1, 3, 0, 2, 4).reshape(-1, query.shape[0], size))

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

    def _plan(self, window: int | None, query: Tensor) -> Iterator[_Group]:
        """Group the batch's queries; the same for every layer with this window."""
        decodes: list[tuple[int, int, int]] = []
        first = 0
        for span, (count, context) in enumerate(zip(self._batch.counts, self._batch.contexts, strict=True)):
            if count == 1:
                decodes.append((context, span, first))
            else:
                step = _SCORE_BYTES // (query.shape[0] * query.element_size() * context)
                step = min(_MAX_BLOCK, max(_MIN_BLOCK, step))
                for start in range(0, count, step):
                    stop = min(count, start + step)
                    rows = torch.arange(first + start, first + stop)
                    yield self._block(span, rows, context - count + stop, window)
            first += count
        # By length: sequences of a group are padded to its longest.
        decodes.sort(reverse=True)
        yield from self._decodes(decodes, window)

    def _block(self, span: int, rows: Tensor, high: int, window: int | None) -> _Group:
        """Consecutive queries of one sequence, the last of them at position `high - 1`."""
        size = self._pages.page_size
        low = _low(high - len(rows) + 1, window) // size
        pages = self._batch.block_table[span, low : -(-high // size)].long()
        length = len(pages) * size
        # Without a window only positions from the first query on can be hidden from a later one.
        tail = length if window is not None and high > window else length - (high - low * size) + len(rows)
        distance = torch.arange(high - len(rows), high)[:, None] - torch.arange(
            low * size + length - tail, low * size + length
        )
        hidden = distance < 0 if window is None else (distance < 0) | (distance >= window)
        return _Group(rows, pages, 1, hidden[None, None], torch.arange(high - low * size, length))

    def _decodes(self, decodes: list[tuple[int, int, int]], window: int | None) -> Iterator[_Group]:
        """Group (context, span, position in the batch), longest first, within `_GROUP_BYTES` and twofold lengths."""
        keys = self._pages.keys[0]
        page_bytes = keys.element_size() * keys.shape[0] * keys.shape[2] * keys.shape[3]
        members: list[tuple[int, int, int]] = []
        longest = 0
        for member in decodes:
            length = self._num_pages(member[0], window)
            full = (len(members) + 1) * longest * page_bytes > _GROUP_BYTES
            if members and (full or 2 * length < longest):
                yield self._decode(members, longest, window)
                members = []
            if not members:
                longest = length
            longest = max(longest, length)
            members.append(member)
        if members:
            yield self._decode(members, longest, window)

    def _num_pages(self, context: int, window: int | None) -> int:
        size = self._pages.page_size
        return -(-context // size) - _low(context, window) // size

    def _decode(self, members: list[tuple[int, int, int]], longest: int, window: int | None) -> _Group:
        """Sequences with one query each, of at most `longest` pages in sight."""
        size = self._pages.page_size
        contexts, spans, rows = (torch.tensor(column) for column in zip(*members, strict=True))
        lows = torch.tensor([_low(context, window) for context, _, _ in members])
        starts = lows // size
        # Past its end a sequence gathers whatever the table holds there; all of that is hidden.
        columns = (starts[:, None] + torch.arange(longest)).clamp_(max=self._batch.block_table.shape[1] - 1)
        pages = self._batch.block_table[spans[:, None], columns].long().flatten()
        places = starts[:, None] * size + torch.arange(longest * size)
        after = places >= contexts[:, None]
        hidden = after | (places < lows[:, None])
        stale = after.flatten().nonzero().squeeze(1)
        return _Group(rows, pages, len(members), hidden[:, None, None], stale)


def _low(context: int, window: int | None) -> int:
    """The first position the last of `context` positions sees."""
    return 0 if window is None else max(0, context - window)


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
