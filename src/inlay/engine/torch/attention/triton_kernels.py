"""Attention over pages on a GPU, in Triton: every kind of layer, any page size, no copies of keys.

A program attends with some queries of one key head to tiles of positions, which it reads from the
pages in place. The softmax is online, as in FlashAttention-2 (arXiv 2307.08691). A sequence with
one query has SPLITS programs for each head, each with every SPLITS-th tile, and a second kernel
joins them ("Flash-Decoding", Dao et al., 2023). Tiles begin at multiples of their size and SPLITS
is fixed, so the result of a single query does not depend on the rest of the batch.

Launches depend on shapes alone, so that CUDA graphs can hold them. Not run on a GPU yet; the tests
run the same kernels in Triton's interpreter.

Shapes: T queries, Q query heads, H key heads, G = Q / H, D key size, E value size, N pages of P
positions, S sequences, W pages of the longest.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from inlay.engine.torch.attention.cuda import Sequences
from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.windows import Chunk, size_of

SPLITS = 16
"""Programs that share the positions of a sequence with one query, for each head."""

_MEDIUM_HEAD, _LARGE_HEAD = 128, 256
"""Sizes of keys above which tiles are smaller, to fit into registers and shared memory."""


# Variants of these would be compiled while requests wait: whether a number is 1 or a multiple of 16
# and an address one of 16 changes with the batch.
@triton.jit(
    do_not_specialize=["num_sequences", "table_row"],
    do_not_specialize_on_alignment=["table", "contexts", "last"],
)
def _attend(
    out, stats, query, keys, values, table, starts, contexts, last, sinks,
    scale, softcap, window, num_sequences, query_head, query_row, key_head, key_page, key_row,
    value_head, value_page, value_row, table_row,
    GROUP: tl.constexpr, HEADS: tl.constexpr, HEAD_BLOCKS: tl.constexpr, D: tl.constexpr,
    D1: tl.constexpr, D2: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, PAGE: tl.constexpr,
    ROWS: tl.constexpr, TILE: tl.constexpr, PARTS: tl.constexpr, HAS_LAST: tl.constexpr,
    WINDOWED: tl.constexpr, CHUNKED: tl.constexpr, CAPPED: tl.constexpr, SUNK: tl.constexpr,
    LATENT: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Attend with ROWS rows of query and head; with PARTS > 1 for sequences with one query only.

    Rows are HEADS heads of ROWS // HEADS queries. Keys are read in two pieces, of D1 elements and
    of D2, as sizes of tiles are powers of two.
    """
    QUERIES: tl.constexpr = ROWS // HEADS if PARTS == 1 else 1
    tile = tl.program_id(0)
    kv = tl.program_id(1) // HEAD_BLOCKS
    part = tl.program_id(2)
    if PARTS > 1:
        sequence = tile
        start = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - start
        first = 0
        if count != 1:
            return
    else:
        # The last sequence whose tiles begin at or before this one; a sequence from row r on has
        # its first tile at r // QUERIES and one for each sequence before it.
        low = 0
        high = num_sequences
        while low < high:
            middle = (low + high) // 2
            if tl.load(starts + middle) // QUERIES + middle <= tile:
                low = middle + 1
            else:
                high = middle
        sequence = low - 1
        start = tl.load(starts + sequence)
        count = tl.load(starts + sequence + 1) - start
        first = (tile - start // QUERIES - sequence) * QUERIES
        if first >= count:
            return
        if count == 1:
            return
    context = tl.load(contexts + sequence)
    row = tl.arange(0, ROWS)
    offset = first + row // HEADS
    member = (tl.program_id(1) % HEAD_BLOCKS) * HEADS + row % HEADS
    real = (row < QUERIES * HEADS) & (offset < count) & (member < GROUP)
    head = kv * GROUP + member
    position = context - count + offset
    sees = position
    if HAS_LAST:
        sees = tl.load(last + start + offset, mask=real, other=0)

    d1 = tl.arange(0, D1)
    queries = query + head.to(tl.int64) * query_head + (start + offset).to(tl.int64) * query_row
    q1 = tl.load(queries[:, None] + d1[None, :], mask=real[:, None] & (d1 < D)[None, :], other=0.0)
    if D2 > 0:
        d2 = D1 + tl.arange(0, D2)
        q2 = tl.load(
            queries[:, None] + d2[None, :], mask=real[:, None] & (d2 < D)[None, :], other=0.0
        )

    stop = context
    if not HAS_LAST:
        stop = tl.minimum(context, context - count + first + QUERIES)
    lowest = 0
    if WINDOWED:
        lowest = tl.maximum(0, context - count + first - window + 1)
    if CHUNKED:
        lowest = (context - count + first) // window * window
    begin = lowest // TILE
    begin += (part + PARTS - begin % PARTS) % PARTS
    end = tl.cdiv(stop, TILE)

    best = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)
    if SUNK:
        sink = tl.load(sinks + head, mask=real, other=0.0).to(tl.float32)
        best = tl.where(part == 0, sink, best)
        total = tl.where(part == 0, 1.0, total)
    found = tl.zeros([ROWS, E_BLOCK], tl.float32)
    e = tl.arange(0, E_BLOCK)
    for index in range(begin, end, PARTS):
        places = index * TILE + tl.arange(0, TILE)
        known = places < context
        page = tl.load(
            table + sequence.to(tl.int64) * table_row + places // PAGE, mask=known, other=0
        ).to(tl.int64)
        at = keys + kv.to(tl.int64) * key_head + page * key_page + (places % PAGE) * key_row
        k1 = tl.load(at[None, :] + d1[:, None], mask=known[None, :] & (d1 < D)[:, None], other=0.0)
        scores = tl.dot(q1, k1, input_precision=PRECISION)
        if D2 > 0:
            k2 = tl.load(
                at[None, :] + d2[:, None], mask=known[None, :] & (d2 < D)[:, None], other=0.0
            )
            scores += tl.dot(q2, k2, input_precision=PRECISION)
        scores *= scale
        if CAPPED:
            # softcap * tanh(scores / softcap)
            scores = softcap * (2.0 / (1.0 + tl.exp(-2.0 * scores / softcap)) - 1.0)
        seen = places[None, :] <= sees[:, None]
        if WINDOWED:
            seen = seen & (position[:, None] - places[None, :] < window)
        if CHUNKED:
            seen = seen & (places[None, :] >= (position // window * window)[:, None])
        scores = tl.where(seen, scores, float("-inf"))
        top = tl.maximum(best, tl.max(scores, 1))
        # A row that has seen nothing yet: exp(-inf - -inf) is no number.
        level = tl.where(top == float("-inf"), 0.0, top)
        weights = tl.exp(scores - level[:, None])
        earlier = tl.exp(best - level)
        total = total * earlier + tl.sum(weights, 1)
        if LATENT:
            v = tl.trans(k1)
        else:
            there = values + kv.to(tl.int64) * value_head
            there += page * value_page + (places % PAGE) * value_row
            v = tl.load(
                there[:, None] + e[None, :], mask=known[:, None] & (e < E)[None, :], other=0.0
            )
        found = found * earlier[:, None]
        found += tl.dot(weights.to(v.dtype), v, input_precision=PRECISION)
        best = top

    store = real[:, None] & (e < E)[None, :]
    num_heads = tl.num_programs(1) // HEAD_BLOCKS * GROUP
    if PARTS == 1:
        place = ((start + offset).to(tl.int64) * num_heads + head) * E
        result = found / total[:, None]
        tl.store(out + place[:, None] + e[None, :], result.to(out.dtype.element_ty), mask=store)
    else:
        place = (sequence.to(tl.int64) * num_heads + head) * PARTS + part
        tl.store(stats + place * 2, best, mask=real)
        tl.store(stats + place * 2 + 1, total, mask=real)
        # Where there is nothing to add, `_join` does not look.
        if SUNK:
            end = tl.where(part == 0, begin + 1, end)
        if begin < end:
            tl.store(out + place[:, None] * E + e[None, :], found, mask=store)


@triton.jit
def _join(
    out, parts, stats, starts,
    E: tl.constexpr, E_BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """Join the parts of one head of a sequence with one query."""
    sequence = tl.program_id(0)
    head = tl.program_id(1)
    start = tl.load(starts + sequence)
    if tl.load(starts + sequence + 1) - start != 1:
        return
    num_heads = tl.num_programs(1)
    place = (sequence.to(tl.int64) * num_heads + head) * PARTS + tl.arange(0, PARTS)
    best = tl.load(stats + place * 2)
    total = tl.load(stats + place * 2 + 1)
    weights = tl.exp(best - tl.max(best, 0))
    e = tl.arange(0, E_BLOCK)
    # Parts without positions have not been written.
    used = (total != 0)[:, None] & (e < E)[None, :]
    found = tl.load(parts + place[:, None] * E + e[None, :], mask=used, other=0.0)
    result = tl.sum(found * weights[:, None], 0) / tl.sum(total * weights, 0)
    at = out + (start.to(tl.int64) * num_heads + head) * E + e
    tl.store(at, result.to(out.dtype.element_ty), mask=e < E)


def attend(
    out: Tensor,
    query: Tensor,
    keys: Tensor,
    values: Tensor,
    table: Tensor,
    sequences: Sequences,
    last: Tensor | None,
    scoring: Scoring,
) -> None:
    """Attend causally within each sequence, over positions that the pages hold already.

    Args:
        out: [T, Q, E], contiguous; its first rows are written, one for each query.
        query: [Q, T, D], contiguous in D.
        keys: [H, N, P, D], contiguous in D.
        values: [H, N, P, E], likewise; of latent layers a view of the first part of `keys`.
        table: [S, W] int32, pages of each sequence.
        sequences: lengths of the sequences.
        last: [T] int32, last position that each query sees; None: its own.
        scoring: parameters of the scores.
    """
    num_heads, group = len(keys), len(query) // len(keys)
    size, value_size = keys.shape[3], values.shape[3]
    whole = max(16, 1 << (size.bit_length() - 1))
    rest = max(16, triton.next_power_of_2(size - whole)) if size > whole else 0
    value_block = max(16, triton.next_power_of_2(value_size))
    float32 = query.dtype == torch.float32
    large = size > _LARGE_HEAD or float32
    tile = 32 if large else 64
    common: dict[str, Any] = {
        "GROUP": group, "D": size, "D1": whole, "D2": rest, "E": value_size,
        "E_BLOCK": value_block, "PAGE": keys.shape[2], "TILE": tile,
        "HAS_LAST": last is not None, "WINDOWED": isinstance(scoring.window, int),
        "CHUNKED": isinstance(scoring.window, Chunk),
        "CAPPED": scoring.softcap is not None, "SUNK": scoring.sinks is not None,
        "LATENT": values.data_ptr() == keys.data_ptr() and value_block == whole,
        # Tensor cores round float32 to 11 bits unless told not to.
        "PRECISION": "ieee" if float32 else "tf32",
    }  # fmt: skip
    shared = (
        query, keys, values, table, sequences.starts, sequences.contexts, last, scoring.sinks,
        scoring.scaling, scoring.softcap or 0.0, size_of(scoring.window) or 0,
        len(sequences.contexts),
        query.stride(0), query.stride(1), *keys.stride()[:3], *values.stride()[:3],
        table.stride(0),
    )  # fmt: skip
    if sequences.several:
        rows = 32 if large else 64 if size > _MEDIUM_HEAD else 128
        heads = min(group, rows)
        blocks = triton.cdiv(group, heads)
        tiles = sequences.num_queries // (rows // heads) + len(sequences.contexts)
        _attend[(tiles, num_heads * blocks, 1)](
            out, None, *shared, **common, HEADS=heads, HEAD_BLOCKS=blocks, ROWS=rows, PARTS=1,
            num_warps=_warps(rows, value_block), num_stages=2,
        )  # fmt: skip
    if sequences.single:
        rows = min(32, max(16, triton.next_power_of_2(group)))
        heads = min(group, rows)
        blocks = triton.cdiv(group, heads)
        shape = (len(sequences.contexts), len(query), SPLITS)
        parts = out.new_empty(*shape, value_size, dtype=torch.float32)
        stats = out.new_empty(*shape, 2, dtype=torch.float32)
        _attend[(shape[0], num_heads * blocks, SPLITS)](
            parts, stats, *shared, **common, HEADS=heads, HEAD_BLOCKS=blocks, ROWS=rows,
            PARTS=SPLITS, num_warps=_warps(rows, value_block), num_stages=2,
        )  # fmt: skip
        _join[shape[:2]](
            out, parts, stats, sequences.starts, E=value_size, E_BLOCK=value_block, PARTS=SPLITS,
            num_warps=4,
        )  # fmt: skip


def _warps(rows: int, value_block: int) -> int:
    """Return the warps whose registers hold the float32 sums of a program."""
    return 8 if rows * value_block >= 128 * 128 else 4
