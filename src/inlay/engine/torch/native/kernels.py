"""The native kernels as functions on tensors."""

import ctypes
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.native.build import load
from inlay.engine.torch.native.calls import NAMES, functions, integer, number, pointer, structure
from inlay.engine.torch.native.products import Products

_PagedAttention = structure(
    "_PagedAttention", query=pointer, keys=pointer, values=pointer, out=pointer,
    block_table=pointer, spans=pointer, rows=pointer, counts=pointer, contexts=pointer,
    ends=pointer, sinks=pointer, workspace=pointer, query_stride_t=integer,
    query_stride_q=integer, table_stride=integer, sequences=integer, decoding=integer,
    heads=integer, group=integer, num_pages=integer, page_size=integer, key_size=integer,
    value_size=integer, value_stride=integer, window=integer, scaling=number, softcap=number,
    threads=ctypes.c_int32, invariant=ctypes.c_int32,
)  # fmt: skip

_Prepare = structure(
    "_Prepare", projected=pointer, cosine=pointer, sine=pointer, query_norm=pointer,
    key_norm=pointer, slots=pointer, query=pointer, keys=pointer, values=pointer,
    positions=integer, stored=integer, query_heads=integer, heads=integer, size=integer,
    rotated=integer, slots_per_head=integer, eps=number, threads=ctypes.c_int32,
)  # fmt: skip


_Adapt = structure(
    "_Adapt", x=pointer, out=pointer, down=pointer, ups=pointer, sizes=pointer, rows=pointer,
    slots=pointer, count=integer, parts=integer, rank=integer, inputs=integer,
    outputs=integer, threads=ctypes.c_int32,
)  # fmt: skip

_AddAndNorm = structure(
    "_AddAndNorm", x=pointer, addend=pointer, weight=pointer, out=pointer, rows=integer,
    size=integer, eps=number,
)  # fmt: skip

_Gate = structure(
    "_Gate", gate_up=pointer, out=pointer, rows=integer, size=integer, threads=ctypes.c_int32,
    gelu=ctypes.c_int32,
)  # fmt: skip

Call = structure("Call", kernel=pointer, argument=pointer)
"""A kernel, and the address of the structure that it takes."""

_LIBRARIES = ("kernels", "products", "adapters", "quantised", "attention")


class AttentionShape(NamedTuple):
    """Inputs of attention over pages, shared by all layers with the same window.

    Attributes:
        block_table: [sequences of the batch, pages] int32, contiguous.
        spans: [S] int32, row of each sequence in the table; first those that decode, the fewest
            queries first.
        rows: [S] int32, index of its first query in the batch.
        counts: [S] int32, number of its queries.
        contexts: [S] int32, number of positions including the last query's.
        ends: [T] int32, first position of its sequence that a query of the batch does not see.
        decoding: number of sequences that decode.
        window: a position sees itself and the `window - 1` before it; 0 for all before it, -n for
            those before it in its own chunk of n.
        invariant: True: the bits of a position must not depend on whether it decodes.
    """

    block_table: Tensor
    spans: Tensor
    rows: Tensor
    counts: Tensor
    contexts: Tensor
    ends: Tensor
    decoding: int
    window: int
    invariant: bool = False


class Kernels:
    """The compiled kernels.

    All tensors are on the CPU, float32 or bfloat16, and of one dtype per call. Attention takes
    float16 too, if the compiler knows it.

    Attributes:
        files: names of the libraries: kept ones by what they were compiled of, and by.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        products: ctypes.CDLL,
        adapters: ctypes.CDLL,
        quantised: ctypes.CDLL,
        attention: ctypes.CDLL,
    ) -> None:
        self.files = tuple(
            Path(str(each._name)).name
            for each in (library, products, adapters, quantised, attention)
        )
        attended = NAMES
        if hasattr(attention, "inlay_paged_attention_float16"):
            attended = {**NAMES, torch.float16: "float16"}
        self._attention = functions(attention, "paged_attention", pointer, dtypes=attended)
        self._attention_bytes = functions(
            attention, "paged_attention_bytes", pointer, dtypes=attended, result=integer
        )
        self._prepare = functions(library, "prepare", pointer)
        self._rms_norm = functions(
            library, "rms_norm", pointer, pointer, pointer, number, integer, integer,
            ctypes.c_int32,
        )  # fmt: skip
        self._gate = functions(library, "gate", pointer)
        self._clamped = functions(
            library, "clamped_gate", pointer, pointer, integer, integer, number, number,
            ctypes.c_int32,
        )  # fmt: skip
        self._by_name = {
            "attention": self._attention,
            "prepare": self._prepare,
            "add_and_norm": functions(library, "add_and_norm", pointer),
            "gate": self._gate,
        }
        self._run = library.inlay_run
        self._run.argtypes, self._run.restype = (pointer, integer), None
        by_row = (pointer, pointer, integer, integer, ctypes.c_int32)
        self._argmax = functions(library, "argmax", *by_row)
        self._finite = functions(library, "finite", *by_row)
        self._adapt = functions(adapters, "adapt", pointer)
        self.products = Products(products, quantised)

    @staticmethod
    def serve(dtype: torch.dtype) -> bool:
        """Return True if there are kernels for `dtype`."""
        return dtype in NAMES

    def attends(self, dtype: torch.dtype) -> bool:
        """Return True if `attend` reads `dtype`."""
        return dtype in self._attention

    def attend(
        self, dtype: torch.dtype, call: ctypes.Structure, scratch: Callable[[int], Tensor]
    ) -> None:
        """Run an `attention_call` of queries in `dtype`.

        `scratch` gives memory of so many bytes until it returns.
        """
        memory = scratch(self._attention_bytes[dtype](ctypes.byref(call)))
        call.workspace = memory.data_ptr()
        self._attention[dtype](ctypes.byref(call))

    def attention_bytes(self, dtype: torch.dtype, call: ctypes.Structure) -> int:
        """Return the bytes of the workspace of `attention_call`."""
        return int(self._attention_bytes[dtype](ctypes.byref(call)))

    @staticmethod
    def attention_call(
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        shape: AttentionShape,
        scaling: float,
        softcap: float,
        sinks: Tensor | None,
    ) -> Any:
        """Return what "attention" takes, which attends to the positions that each query sees.

        It has no workspace yet. A position of a prompt has the same bits whatever chunk it comes
        in, and with `shape.invariant` those that it would have if it decoded. Decoding reads keys
        and values where they lie, but for some CPUs in another order of sums: there it then takes
        longer.

        Args:
            out: [T, Q, value size], contiguous, is written.
            query: [T, Q, key size], the last dimension contiguous.
            keys: [H, N, P, key size], contiguous; P is a multiple of 16.
            values: [H, N, P, value size], contiguous, or the first part of `keys`.
            shape: sequences, queries and window.
            scaling: factor of the scores.
            softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
            sinks: [Q] float32, one more score of each head, whose value is zero; None for none.
        """
        heads, num_pages, page_size, key_size = keys.shape
        return _PagedAttention(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            shape.block_table.data_ptr(), shape.spans.data_ptr(), shape.rows.data_ptr(),
            shape.counts.data_ptr(), shape.contexts.data_ptr(), shape.ends.data_ptr(),
            None if sinks is None else sinks.data_ptr(), None, query.stride(0), query.stride(1),
            shape.block_table.shape[1], len(shape.spans), shape.decoding, heads,
            query.shape[1] // heads, num_pages, page_size, key_size, values.shape[3],
            values.stride(2), shape.window, scaling, softcap, torch.get_num_threads(),
            shape.invariant,
        )  # fmt: skip

    def kernel(self, name: str, dtype: torch.dtype) -> int | None:
        """Return the address of a kernel that takes one structure."""
        return ctypes.cast(self._by_name[name][dtype], pointer).value

    def run(self, calls: "ctypes.Array[ctypes.Structure]") -> None:
        """Run calls one after another."""
        self._run(ctypes.addressof(calls), len(calls))

    def argmax(self, rows: Tensor) -> Tensor:
        """Return the first maximum of each of `rows` [S, V], contiguous; NaN is the largest.

        [S] int64, as `Tensor.argmax`.
        """
        out = torch.empty(len(rows), dtype=torch.int64)
        self._argmax[rows.dtype](
            out.data_ptr(), rows.data_ptr(), *rows.shape, torch.get_num_threads()
        )
        return out

    def finite(self, rows: Tensor) -> Tensor:
        """Return bool [S]: True for `rows` [S, V], contiguous, that are wholly finite."""
        out = torch.empty(len(rows), dtype=torch.bool)
        self._finite[rows.dtype](
            out.data_ptr(), rows.data_ptr(), *rows.shape, torch.get_num_threads()
        )
        return out

    @property
    def invariance_is_free(self) -> bool:
        """True if the fastest way of all products and of attention in bfloat16 is invariant."""
        return self.products.pairs and not self.products.tiles

    def adapt(
        self,
        out: Tensor,
        x: Tensor,
        down: Tensor,
        ups: Sequence[Tensor],
        rows: Tensor,
        slots: Tensor,
    ) -> None:
        """Add low-rank adapters of `x` to some rows of `out` [T, O], contiguous.

        Args:
            out: outputs of all parts of a linear, side by side.
            x: [T, I], contiguous.
            down: [slots, parts, rank, I], contiguous.
            ups: for each part [slots, rank, its outputs], contiguous.
            rows: int32, indices of rows with an adapter, ordered by slot.
            slots: int32, slot of each of `rows`.
        """
        _, parts, rank, inputs = down.shape
        sizes = (integer * parts)(*(up.shape[2] for up in ups))
        addresses = (pointer * parts)(*(up.data_ptr() for up in ups))
        call = _Adapt(
            x.data_ptr(), out.data_ptr(), down.data_ptr(), ctypes.addressof(addresses),
            ctypes.addressof(sizes), rows.data_ptr(), slots.data_ptr(), len(rows), parts, rank,
            inputs, out.shape[1], torch.get_num_threads(),
        )  # fmt: skip
        self._adapt[x.dtype](ctypes.byref(call))

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """Apply the root-mean-square norm to contiguous `x` [..., C]; `weight` [C] float32."""
        out = torch.empty_like(x)
        size = x.shape[-1]
        self._rms_norm[x.dtype](
            out.data_ptr(), x.data_ptr(), weight.data_ptr(), eps, x.numel() // size, size,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def silu_and_multiply(self, gate_up: Tensor) -> Tensor:
        """Compute silu(gate) * up [..., I] of [..., 2 I], as `multiply` does."""
        return self.multiply(gate_up, gelu=False)

    def multiply(self, gate_up: Tensor, *, gelu: bool) -> Tensor:
        """Compute act(gate) * up [..., I] of [..., 2 I] contiguous, gate then up.

        The function is SiLU, or GELU in its approximation by tanh.
        """
        out = gate_up.new_empty(*gate_up.shape[:-1], gate_up.shape[-1] // 2)
        self._gate[out.dtype](ctypes.byref(self.gate_call(gate_up, out, gelu=gelu)))
        return out

    def clamped_gate(self, gate_up: Tensor, alpha: float, limit: float) -> Tensor:
        """Compute (up + 1) * gate * sigmoid(alpha * gate) [..., I] of [..., 2 I] contiguous.

        Gates and ups are by turns; first, gates are at most `limit`, and ups within it.
        """
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        self._clamped[gate_up.dtype](
            out.data_ptr(), gate_up.data_ptr(), gate_up.numel() // (2 * size), size, alpha, limit,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def prepare(self, dtype: torch.dtype, call: ctypes.Structure) -> None:
        """Run a `prepare_call` of projections in `dtype`."""
        self._prepare[dtype](ctypes.byref(call))

    @staticmethod
    def prepare_call(
        projected: Tensor,
        cosine: Tensor,
        sine: Tensor,
        norms: "tuple[Tensor, Tensor] | None",
        eps: float,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        query: Tensor,
    ) -> ctypes.Structure:
        """Return what "prepare" takes, which norms, rotates and stores queries, keys and values.

        Args:
            projected: [T, (Q + 2 H) * D] contiguous: query, key and value heads of each position.
            cosine: [T, R], of the rotary embedding, R <= D; halves, as in transformers' Llama.
            sine: likewise.
            norms: [D] float32 each, weights of the norms of query heads and key heads; None for no
                norms.
            eps: epsilon of the norms.
            slots: [stored] int64, for the first `stored` positions; the rest is padding.
            keys: [H, N, P, D] contiguous, their pages.
            values: likewise.
            query: [T, Q, D], the queries, is written.
        """
        heads, num_pages, page_size, size = keys.shape
        return _Prepare(
            projected.data_ptr(), cosine.data_ptr(), sine.data_ptr(),
            None if norms is None else norms[0].data_ptr(),
            None if norms is None else norms[1].data_ptr(), slots.data_ptr(), query.data_ptr(),
            keys.data_ptr(), values.data_ptr(), projected.shape[0], len(slots), query.shape[1],
            heads, size, cosine.shape[-1], num_pages * page_size, eps, torch.get_num_threads(),
        )  # fmt: skip

    @staticmethod
    def norm_call(
        x: Tensor, addend: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> ctypes.Structure:
        """Return what "add_and_norm" takes: `addend` is added to `x` [T, C], the sum normed."""
        return _AddAndNorm(
            x.data_ptr(), None if addend is None else addend.data_ptr(), weight.data_ptr(),
            out.data_ptr(), *x.shape, eps,
        )  # fmt: skip

    @staticmethod
    def gate_call(gate_up: Tensor, out: Tensor, *, gelu: bool) -> ctypes.Structure:
        """Return what "gate" takes; as `multiply`, to `out`."""
        size = out.shape[-1]
        return _Gate(
            gate_up.data_ptr(), out.data_ptr(), out.numel() // size, size,
            torch.get_num_threads(), gelu,
        )  # fmt: skip


@cache
def kernels() -> Kernels | None:
    """Return this process's kernels, compiled at the first call; None if not available."""
    found = [load(name) for name in _LIBRARIES]
    libraries = [library for library in found if library is not None]
    return Kernels(*libraries) if len(libraries) == len(found) else None
