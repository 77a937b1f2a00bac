"""Operations of a layer between its products and attention on a GPU, in Triton.

One kernel norms and rotates queries and keys and writes keys and values to their pages, one
computes gated units. In transformers these are some fifteen operations, each of which reads and
writes all that it works on. Both compute in float32 and round once. Not run on a GPU yet; the tests
run the kernels in Triton's interpreter.

Shapes: T positions, Q query heads, H key heads, D elements of a head, of which R are rotated.
"""

import triton
import triton.language as tl
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from inlay.engine.torch.attention.paged import Projection

_ELEMENTS = 512
"""Elements that a program of `_prepare` has of each half."""

_COLUMNS = 1024
"""Columns that a program of `_multiply` has."""


@triton.jit
def _normed(x, factor, query_norm, key_norm, columns, mask, of_query):
    """Scale rows `x` by `factor` and by the weights of the norms."""
    own = tl.load(query_norm + columns, mask=mask, other=0.0).to(tl.float32)
    other = tl.load(key_norm + columns, mask=mask, other=0.0).to(tl.float32)
    return x * factor[:, None] * tl.where(of_query[:, None], own[None, :], other[None, :])


# Whether an address of slots is a multiple of 16 changes with the batch.
@triton.jit(do_not_specialize=["stored"], do_not_specialize_on_alignment=["slots"])
def _prepare(
    query, heads, cosine, sine, query_norm, key_norm, slots, keys, values,
    eps, stored, angle_row, key_head, value_head,
    Q: tl.constexpr, H: tl.constexpr, D: tl.constexpr, HALF: tl.constexpr, ROWS: tl.constexpr,
    HALF_BLOCK: tl.constexpr, REST_BLOCK: tl.constexpr, NORMED: tl.constexpr,
):  # fmt: skip
    """Norm, rotate and store ROWS heads of one position."""
    position = tl.program_id(0).to(tl.int64)
    row = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
    of_query = row < Q
    rotates = row < Q + H
    # Of padding only the queries are computed.
    real = row < tl.where(position < stored, Q + 2 * H, Q)
    slot = tl.load(slots + tl.minimum(position, stored - 1))
    head = row.to(tl.int64)
    own = query + (position * Q + head) * D
    place = slot * D
    paged = tl.where(
        rotates, keys + (head - Q) * key_head + place, values + (head - Q - H) * value_head + place
    )
    to = tl.where(of_query, own, paged)
    if D % 8 == 0:
        # Every head begins at a multiple of 16 bytes, which the compiler does not see.
        to = tl.multiple_of(to, 16)
    to = to[:, None]
    given = heads + (position * (Q + 2 * H) + head)[:, None] * D

    low = tl.arange(0, HALF_BLOCK)
    half = low < HALF
    mask = real[:, None] & half[None, :]
    x = tl.load(given + low[None, :], mask=mask, other=0.0).to(tl.float32)
    y = tl.load(given + (HALF + low)[None, :], mask=mask, other=0.0).to(tl.float32)
    c = tl.load(cosine + position * angle_row + low, mask=half, other=0.0).to(tl.float32)[None, :]
    s = tl.load(sine + position * angle_row + low, mask=half, other=0.0).to(tl.float32)[None, :]
    rest = 2 * HALF + tl.arange(0, REST_BLOCK)
    beyond = rest < D
    others = real[:, None] & beyond[None, :]
    z = tl.load(given + rest[None, :], mask=others, other=0.0).to(tl.float32)
    first, second, third = x, y, z
    if NORMED:
        squares = tl.sum(x * x, 1) + tl.sum(y * y, 1) + tl.sum(z * z, 1)
        factor = tl.rsqrt(squares / D + eps)
        first = _normed(x, factor, query_norm, key_norm, low, half, of_query)
        second = _normed(y, factor, query_norm, key_norm, HALF + low, half, of_query)
        third = _normed(z, factor, query_norm, key_norm, rest, beyond, of_query)
    turns = rotates[:, None]
    dtype = query.dtype.element_ty
    tl.store(to + low[None, :], tl.where(turns, first * c - second * s, x).to(dtype), mask=mask)
    tl.store(
        to + (HALF + low)[None, :],
        tl.where(turns, second * c + first * s, y).to(dtype),
        mask=mask,
    )
    tl.store(to + rest[None, :], tl.where(turns, third, z).to(dtype), mask=others)


@triton.jit
def _multiply(out, gate_up, SIZE: tl.constexpr, GELU: tl.constexpr, COLUMNS: tl.constexpr):
    """Compute COLUMNS gated units of one position."""
    position = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = column < SIZE
    given = gate_up + position * (2 * SIZE) + column
    gate = tl.load(given, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(given + SIZE, mask=mask, other=0.0).to(tl.float32)
    inner = gate
    if GELU:
        # (1 + tanh(x)) / 2 is sigmoid(2 x); the factor is 2 * sqrt(2 / pi).
        inner = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    found = gate * tl.sigmoid(inner) * up
    tl.store(out + position * SIZE + column, found.to(out.dtype.element_ty), mask=mask)


def prepare(
    query: Tensor, projection: Projection, slots: Tensor, keys: Tensor, values: Tensor
) -> None:
    """Norm and rotate queries and keys, and store keys and values in their pages.

    Args:
        query: [T, Q, D], contiguous; the queries are written to it.
        projection: of T positions; what they are computed from.
        slots: [stored] int64, for the first `stored` positions; the rest is padding.
        keys: [H, N, P, D], contiguous in all but H.
        values: likewise.
    """
    positions, query_heads, size = query.shape
    half = projection.rotated // 2
    block = max(16, triton.next_power_of_2(half))
    rows = max(1, _ELEMENTS // block)
    norms = (None, None) if projection.norms is None else projection.norms
    _prepare[(positions, triton.cdiv(query_heads + 2 * len(keys), rows))](
        query, projection.heads, projection.cosine, projection.sine, *norms, slots, keys, values,
        projection.eps, len(slots), projection.cosine.stride(0), keys.stride(0), values.stride(0),
        Q=query_heads, H=len(keys), D=size, HALF=half, ROWS=rows, HALF_BLOCK=block,
        REST_BLOCK=triton.next_power_of_2(max(1, size - 2 * half)),
        NORMED=projection.norms is not None, num_warps=4,
    )  # fmt: skip


def multiply(gate_up: Tensor, *, gelu: bool) -> Tensor:
    """Compute act(gate) * up [..., I] of [..., 2 I] contiguous, gate then up.

    The function is SiLU, or GELU in its approximation by tanh. A rehearsal on meta tensors
    launches nothing.
    """
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty(*gate_up.shape[:-1], size)
    if out.numel() and not isinstance(out, FakeTensor):
        _multiply[(out.numel() // size, triton.cdiv(size, _COLUMNS))](
            out, gate_up, SIZE=size, GELU=gelu, COLUMNS=_COLUMNS, num_warps=4
        )
    return out
