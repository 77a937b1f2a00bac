"""Attention over gathered pages: any scoring, any head size, any device.

Scores are matrix products over gathered pages; the queries of a group of heads are rows of one
product. Used on CPUs without a compiler, for latents that are expanded, and on CUDA for layers that
flash attention does not support; and what tests hold the native kernel against.

Shapes: T positions in the step, Q query heads, H key/value heads, G = Q / H, D key size, E value
size, B sequences in a group, C queries and L gathered positions of each, N pages, P positions a
page.
"""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch, Workspace
from inlay.engine.torch.lora import BASE
from inlay.engine.torch.windows import Chunk, Window, first_seen, size_of

_GROUP_BYTES = 1 << 20
"""Maximum size of the keys of sequences that decode together, in bytes.

Gathered keys and values should fit into a core's cache.
"""

_SCORE_BYTES = 1 << 21
"""Maximum size of the scores of a prompt attended to at once, in bytes; for the same reason."""

_BLOCK_BYTES = 1 << 22
"""Approximate maximum size of the scores of one block of a longer prompt's queries, in bytes.

Every product lays out the keys again for oneDNN, so more queries per block matter more than scores
that fit into the cache.
"""

_MIN_BLOCK, _MAX_BLOCK = 16, 256
"""Minimum and maximum number of queries in a block."""


class _Group(NamedTuple):
    """B sequences with C queries each, attended to in one product over whole pages.

    Whole pages, as a product over a slice of the gathered keys would first copy and transpose them.

    Attributes:
        rows: [B * C] int64, indices of the queries in the batch.
        pages: [page groups, B * L / P] int64, pages to gather.
        num_sequences: B.
        hidden: [B, 1, C, up to L] bool, masks the last gathered positions for each query.
        stale: int64, indices in B * L that do not belong to the sequence.
        adapter: slot of the adapter by which latents are expanded, or `lora.BASE`.
    """

    rows: Tensor
    pages: Tensor
    num_sequences: int
    hidden: Tensor
    stale: Tensor
    adapter: int = BASE


class _Block(NamedTuple):
    """Some of a prompt's queries and the positions they see. Indices count gathered positions.

    Attributes:
        rows: slice of the prompt's queries.
        seen: slice from the first position the first query sees to the last of the last query.
        hidden: [C, up to L] bool, masks the last of those positions for each query.
    """

    rows: slice
    seen: slice
    hidden: Tensor


class _Prompt(NamedTuple):
    """Many queries of one sequence.

    Its pages are gathered once, then attended to head by head and block by block.

    The keys of a head are contiguous, so a product can use any slice of them without a copy.

    Attributes:
        rows: indices of the queries in the batch.
        pages: [number of page groups, L / P] int64, pages to gather.
        blocks: blocks of queries, in order.
        adapter: as in `_Group`.
    """

    rows: slice
    pages: Tensor
    blocks: list[_Block]
    adapter: int = BASE


class GatheredAttention:
    """Batched matrix products over gathered pages.

    In bfloat16, scores are rounded to bfloat16 before the softmax, as in transformers' eager
    attention; `float32_scores` avoids it for models with large scores.
    """

    def __init__(
        self,
        batch: Batch,
        pages: Pages,
        workspace: Workspace,
        *,
        float32_scores: bool = False,
    ) -> None:
        self._batch = batch
        self._pages = pages
        self._workspace = workspace
        self._float32_scores = float32_scores
        self._slots = batch.slots.unbind()
        self._device = batch.slots.device
        self._plans: dict[Window, list[_Group | _Prompt]] = {}

    def attend(
        self,
        layer: int,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        scoring: Scoring,
    ) -> Tensor:
        """Attend as `PagedAttention.attend` does."""
        slots = self._slots[self._pages.groups[layer]]
        count = len(slots)
        self._pages.write(layer, slots, key[:, :count], value[:, :count])
        size = value.shape[2] if scoring.latent is None else scoring.latent.value_size
        out = query.new_empty(query.shape[1], query.shape[0], size)
        out[count:] = 0
        groups = self._plans.get(scoring.window)
        if groups is None:
            groups = self._plans[scoring.window] = list(self._plan(scoring, query))
        for group in groups:
            if isinstance(group, _Prompt):
                self._attend_prompt(group, layer, query, scoring, out)
            else:
                self._attend(group, layer, query, scoring, out)
        return out

    def _attend(
        self, group: _Group, layer: int, query: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        keys, values = self._gather(group.pages[self._pages.groups[layer]], layer)
        num_heads, size, value_size = keys.shape[0], keys.shape[3], values.shape[3]
        # Clear stale values: zero times a stale NaN is NaN.
        values.view(num_heads, -1, value_size).index_fill_(1, group.stale, 0)
        if scoring.latent is not None:
            every = slice(query.shape[0])
            keys, values = scoring.latent.expand(keys.view(-1, size), every, group.adapter)
            num_heads, size, value_size = len(keys), keys.shape[2], values.shape[2]
        batch = num_heads * group.num_sequences
        # [H, G, B, C, D] to [H, B, G, C, D]: the queries of a group of heads are rows of one
        # product.
        apart = (num_heads, query.shape[0] // num_heads, group.num_sequences, -1)
        queries = (
            query.index_select(1, group.rows)
            .reshape(*apart, size)
            .transpose(1, 2)
            .reshape(batch, -1, size)
        )
        scores = self._scores(queries, keys.view(batch, -1, size), scoring)
        seen = scores.view(num_heads, group.num_sequences, apart[1], -1, scores.shape[-1])
        seen[..., -group.hidden.shape[-1] :].masked_fill_(group.hidden.unsqueeze(0), float("-inf"))
        found = torch.bmm(
            torch.softmax(scores, -1).to(values.dtype), values.view(batch, -1, value_size)
        )
        found = found.view(num_heads, group.num_sequences, apart[1], -1, value_size)
        if scoring.sinks is not None:
            found = found * sink_scale(
                torch.logsumexp(seen.float(), -1, keepdim=True),
                scoring.sinks.view(num_heads, 1, -1, 1, 1),
            ).to(found.dtype)
        out.index_copy_(
            0, group.rows, found.permute(1, 3, 0, 2, 4).reshape(-1, query.shape[0], value_size)
        )

    def _attend_prompt(
        self, prompt: _Prompt, layer: int, query: Tensor, scoring: Scoring, out: Tensor
    ) -> None:
        keys, values = (
            pages.flatten(1, 2)
            for pages in self._gather(prompt.pages[self._pages.groups[layer]], layer)
        )
        latent = scoring.latent
        group = 1 if latent is not None else query.shape[0] // len(keys)
        for head in range(query.shape[0] // group):
            if latent is None:
                head_keys, head_values = keys[head], values[head]
            else:
                # One head at a time: those of all may take more memory than the model.
                one = slice(head, head + 1)
                (head_keys,), (head_values,) = latent.expand(keys[0], one, prompt.adapter)
            heads = slice(head * group, (head + 1) * group)
            queries, target = query[heads, prompt.rows], out[prompt.rows, heads]
            sinks = None if scoring.sinks is None else scoring.sinks[heads, None, None]
            for block in prompt.blocks:
                own = queries[:, block.rows]
                # A product would copy a slice of a batch of one, but not a batch of one slice.
                seen_keys = head_keys[block.seen].unsqueeze(0)
                scores = self._scores(own.reshape(1, -1, own.shape[2]), seen_keys, scoring)
                scores = scores.view(group, own.shape[1], -1)
                scores[..., -block.hidden.shape[1] :].masked_fill_(block.hidden, float("-inf"))
                weights = torch.softmax(scores, -1).to(head_values.dtype)
                found = (weights.flatten(0, 1) @ head_values[block.seen]).view(
                    group, own.shape[1], -1
                )
                if sinks is not None:
                    lse = torch.logsumexp(scores.float(), -1, keepdim=True)
                    found = found * sink_scale(lse, sinks).to(found.dtype)
                target[block.rows] = found.transpose(0, 1)

    def _gather(self, index: Tensor, layer: int) -> tuple[Tensor, Tensor]:
        """Gather keys and values of some pages, [H, number of pages, P, D or E].

        Valid until the next call.
        """
        gathered = []
        for name, pages in zip(("keys", "values"), self._pages.kept[layer], strict=False):
            shape = (pages.shape[0], len(index), *pages.shape[2:])
            gathered.append(
                torch.index_select(pages, 1, index, out=self._workspace.take(name, shape, pages))
            )
        # Values of latent layers are in the keys.
        return gathered[0], gathered[-1][..., : self._pages.values[layer].shape[3]]

    def _scores(self, queries: Tensor, keys: Tensor, scoring: Scoring) -> Tensor:
        """Return scaled and capped scores, [..., number of queries, number of keys]."""
        if self._float32_scores:
            queries, keys = queries.float(), keys.float()
        cap = scoring.softcap
        factor = scoring.scaling if cap is None else scoring.scaling / cap
        scores = torch.baddbmm(
            queries.new_empty(()), queries, keys.transpose(1, 2), beta=0, alpha=factor
        )
        return scores if cap is None else scores.tanh_().mul_(cap)

    def _plan(self, scoring: Scoring, query: Tensor) -> Iterator[_Group | _Prompt]:
        """Group the batch's queries; the same for all layers with this window."""
        window = scoring.window
        # Expanded, every query head has keys of its own.
        group = 1 if scoring.latent is not None else query.shape[0] // self._pages.keys[0].shape[0]
        decodes: list[tuple[int, int, int]] = []
        first = 0
        for chunk, (count, context) in enumerate(
            zip(self._batch.counts, self._batch.contexts, strict=True)
        ):
            if count == 1:
                decodes.append((context, chunk, first))
            elif query.shape[0] * query.element_size() * count * context <= _SCORE_BYTES:
                yield self._block(chunk, self._arange(first, first + count), context, window)
            else:
                row_bytes = group * query.element_size() * context
                yield self._prompt(chunk, slice(first, first + count), context, window, row_bytes)
            first += count
        # Sorted by length, as sequences of a group are padded to its longest.
        decodes.sort(reverse=True)
        yield from self._decodes(decodes, window)

    def _block(self, chunk: int, rows: Tensor, high: int, window: Window) -> _Group:
        """Return consecutive queries of one sequence, the last of them at position `high - 1`."""
        size = self._pages.page_size
        low = _low(high - len(rows) + 1, window) // size
        pages = self._batch.block_table[:, chunk, low : -(-high // size)].long()
        length = pages.shape[1] * size
        # Without a window, a query can only be blind to positions after itself.
        tail = (
            length if high > (size_of(window) or high) else length - (high - low * size) + len(rows)
        )
        places = self._arange(low * size + length - tail, low * size + length)
        hidden = self._hidden(chunk, high - len(rows), high, places, window)
        stale = self._arange(high - low * size, length)
        return _Group(rows, pages, 1, hidden[None, None], stale, self._adapter(chunk))

    def _adapter(self, chunk: int) -> int:
        return self._batch.adapters[chunk] if self._batch.adapters else BASE

    def _prompt(
        self, chunk: int, rows: slice, context: int, window: Window, row_bytes: int
    ) -> _Prompt:
        """Return all queries of a sequence, the last of them at position `context - 1`.

        A query's scores for one key head are `row_bytes`.
        """
        size, count = self._pages.page_size, rows.stop - rows.start
        step = min(_MAX_BLOCK, max(_MIN_BLOCK, _BLOCK_BYTES // row_bytes))
        start = context - count
        base = _low(start + 1, window) // size * size
        wholes = self._batch.wholes_of(window)
        blocks = []
        for first in range(0, count, step):
            own = slice(first, min(count, first + step))
            stop = start + own.stop
            high = max([stop, *(end for one, at, end in wholes if one == chunk and at < stop)])
            low = _low(start + own.start + 1, window)
            # Without a window, a query can only be blind to positions after itself.
            tail = low if window is not None else start + own.start
            hidden = self._hidden(chunk, start + own.start, stop, self._arange(tail, high), window)
            blocks.append(_Block(own, slice(low - base, high - base), hidden))
        pages = self._batch.block_table[:, chunk, base // size : -(-context // size)].long()
        return _Prompt(rows, pages, blocks, self._adapter(chunk))

    def _hidden(self, chunk: int, start: int, stop: int, places: Tensor, window: Window) -> Tensor:
        """Return which `places` the queries at positions `start` to `stop` must not see, bool.

        A query sees up to its own position, or up to the end of the run that it is in.
        """
        queries = self._arange(start, stop)[:, None]
        last = queries
        for one, first, end in self._batch.wholes_of(window):
            if one == chunk:
                last = torch.where((queries >= first) & (queries < end), end - 1, last)
        hidden = places > last
        if window is None:
            return hidden
        if isinstance(window, Chunk):
            return hidden | (places < queries // window.size * window.size)
        return hidden | (queries - places >= window)

    def _decodes(self, decodes: list[tuple[int, int, int]], window: Window) -> Iterator[_Group]:
        """Group (context, chunk, index in the batch) by length, longest first.

        A group stays within `_GROUP_BYTES`, and its lengths within a factor of two.
        """
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

    def _num_pages(self, context: int, window: Window) -> int:
        size = self._pages.page_size
        return -(-context // size) - _low(context, window) // size

    def _decode(self, members: list[tuple[int, int, int]], longest: int, window: Window) -> _Group:
        """Return the group of sequences with one query each, which see at most `longest` pages."""
        size = self._pages.page_size
        described = [(*member, _low(member[0], window)) for member in members]
        contexts, chunks, rows, lows = torch.tensor(described, device=self._device).unbind(1)
        starts = lows // size
        # Beyond its end a sequence gathers arbitrary pages; all of that is masked.
        columns = (starts[:, None] + self._arange(0, longest)).clamp_(
            max=self._batch.block_table.shape[2] - 1
        )
        pages = self._batch.block_table[:, chunks[:, None], columns].long().flatten(1)
        places = starts[:, None] * size + self._arange(0, longest * size)
        after = places >= contexts[:, None]
        hidden = after | (places < lows[:, None])
        stale = after.flatten().nonzero().squeeze(1)
        return _Group(rows, pages, len(members), hidden[:, None, None], stale)

    def _arange(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop, device=self._device)


def sink_scale(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the factor by which a sink reduces the output of a softmax.

    A sink is one more score without a value: exp(lse) / (exp(lse) + exp(sink)), where `lse` is the
    log-sum-exp of the scores, float32.
    """
    return torch.sigmoid(lse - sinks.float())


def _low(context: int, window: Window) -> int:
    """Return the first position that the last of `context` positions sees."""
    return first_seen(window, context - 1)
