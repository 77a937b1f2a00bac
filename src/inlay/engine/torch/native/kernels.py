"""The native kernels as functions on tensors."""

import ctypes
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.native.build import load

_NAMES = {torch.float32: "float32", torch.bfloat16: "bfloat16"}

_pointer, _integer, _number = ctypes.c_void_p, ctypes.c_int64, ctypes.c_float


def _structure(name: str, **fields: type) -> type[ctypes.Structure]:
    return type(name, (ctypes.Structure,), {"_fields_": list(fields.items())})


_PagedAttention = _structure(
    "_PagedAttention", query=_pointer, keys=_pointer, values=_pointer, out=_pointer,
    block_table=_pointer, spans=_pointer, rows=_pointer, counts=_pointer, contexts=_pointer,
    ends=_pointer, sinks=_pointer, workspace=_pointer, query_stride_t=_integer,
    query_stride_q=_integer, table_stride=_integer, sequences=_integer, decoding=_integer,
    heads=_integer, group=_integer, num_pages=_integer, page_size=_integer, key_size=_integer,
    value_size=_integer, value_stride=_integer, window=_integer, scaling=_number, softcap=_number,
    threads=ctypes.c_int32, invariant=ctypes.c_int32,
)  # fmt: skip

_Prepare = _structure(
    "_Prepare", projected=_pointer, cosine=_pointer, sine=_pointer, query_norm=_pointer,
    key_norm=_pointer, slots=_pointer, query=_pointer, keys=_pointer, values=_pointer,
    positions=_integer, stored=_integer, query_heads=_integer, heads=_integer, size=_integer,
    rotated=_integer, slots_per_head=_integer, eps=_number, threads=ctypes.c_int32,
)  # fmt: skip


_PackedProduct = _structure(
    "_PackedProduct",
    x=_pointer, weight=_pointer, bias=_pointer, out=_pointer,
    rows=_integer, inputs=_integer, outputs=_integer, width=_integer, threads=ctypes.c_int32,
    invariant=ctypes.c_int32,
)  # fmt: skip

_Adapt = _structure(
    "_Adapt", x=_pointer, out=_pointer, down=_pointer, ups=_pointer, sizes=_pointer, rows=_pointer,
    slots=_pointer, count=_integer, parts=_integer, rank=_integer, inputs=_integer,
    outputs=_integer, threads=ctypes.c_int32,
)  # fmt: skip

_QuantisedProduct = _structure(
    "_QuantisedProduct", x=_pointer, codes=_pointer, scales=_pointer, shifts=_pointer,
    bias=_pointer, out=_pointer, rows=_integer, inputs=_integer, outputs=_integer, group=_integer,
    kind=ctypes.c_int32, threads=ctypes.c_int32,
)  # fmt: skip

_CopyPages = _structure(
    "_CopyPages", tensors=_pointer, heads=_pointer, runs=_pointer, pages=_pointer, records=_pointer,
    count=_integer, num_pages=_integer, num_records=_integer, stride=_integer,
    to_pages=ctypes.c_int32,
)  # fmt: skip

_LIBRARIES = ("kernels", "products", "adapters", "quantised", "attention")

_VECTOR_ROWS = 4
"""Maximum number of rows for a packed product with neither tiles nor pairs."""

_TILE_ROWS = 64
"""Maximum number of rows for which tiles are faster than oneDNN.

By a third for 8 and 32, a fifth for 64, a twentieth for 128.
"""

ALL_ROWS = sys.maxsize
"""No limit of rows."""


class Panels(NamedTuple):
    """A bfloat16 weight packed by oneDNN.

    Attributes:
        address: address of [outputs / width, inputs / 2, width, 2].
        outputs: a multiple of `width`.
        inputs: even.
        width: 32 or 64.
        invariant: True: the bits of a row must not depend on the number of rows.
    """

    address: int
    outputs: int
    inputs: int
    width: int
    invariant: bool = False


class Codes(NamedTuple):
    """A quantised weight, in the layout of `quantised.cpp`.

    Attributes:
        kind: 0 for codes of four bits, 1 for eight, 2 for float8 e4m3.
        words: [panels, inputs / n, 64] int32.
        scales: [panels, groups, 64] float32.
        shifts: as scales, or None.
        inputs: of the weight.
        outputs: of the weight.
        group: inputs that share a scale.
    """

    kind: int
    words: Tensor
    scales: Tensor
    shifts: Tensor | None
    inputs: int
    outputs: int
    group: int


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
        window: a position sees itself and the `window - 1` before it; 0 for all before it.
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


class PageTable(NamedTuple):
    """Tensors [H, N, P, D] whose pages are copied together; H, P and D may differ.

    Attributes:
        addresses: [tensors] int64.
        heads: [tensors] int64, H of each.
        runs: [tensors] int64, bytes of a page of one head.
        num_pages: N.
    """

    addresses: Tensor
    heads: Tensor
    runs: Tensor
    num_pages: int

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "PageTable":
        """Of tensors on the CPU, contiguous, which must live for as long as this is used."""
        found = [
            (each.data_ptr(), each.shape[0], each[0, 0].numel() * each.element_size())
            for each in tensors
        ]
        addresses, heads, runs = torch.tensor(found, dtype=torch.int64).T.contiguous()
        return cls(addresses, heads, runs, tensors[0].shape[1])


class Kernels:
    """The compiled kernels.

    All tensors are on the CPU, float32 or bfloat16, and of one dtype per call. Attention takes
    float16 too, if the compiler knows it.
    """

    def __init__(
        self,
        library: ctypes.CDLL,
        products: ctypes.CDLL,
        adapters: ctypes.CDLL,
        quantised: ctypes.CDLL,
        attention: ctypes.CDLL,
    ) -> None:
        attended = _NAMES
        if hasattr(attention, "inlay_paged_attention_float16"):
            attended = {**_NAMES, torch.float16: "float16"}
        self._attention = self._functions(attention, "paged_attention", _pointer, dtypes=attended)
        self._attention_bytes = self._functions(
            attention, "paged_attention_bytes", _pointer, dtypes=attended, result=_integer
        )
        self._prepare = self._functions(library, "prepare", _pointer)
        self._rms_norm = self._functions(
            library, "rms_norm", _pointer, _pointer, _pointer, _number, _integer, _integer,
            ctypes.c_int32,
        )  # fmt: skip
        self._silu = self._functions(
            library, "silu_and_multiply", _pointer, _pointer, _integer, _integer, ctypes.c_int32
        )

        by_row = (_pointer, _pointer, _integer, _integer, ctypes.c_int32)
        self._argmax = self._functions(library, "argmax", *by_row)
        self._finite = self._functions(library, "finite", *by_row)
        self._adapt = self._functions(adapters, "adapt", _pointer)
        self._quantised = self._functions(quantised, "quantised_product", _pointer)
        self._dequantise = self._functions(quantised, "dequantise", _pointer)
        self._product = products.inlay_packed_product_bfloat16
        self._product.argtypes, self._product.restype = (_pointer,), None
        self._copy_pages = library.inlay_copy_pages
        self._copy_pages.argtypes, self._copy_pages.restype = (_pointer,), None
        self._tiles = bool(products.inlay_have_tiles())
        self._pairs = bool(products.inlay_have_pairs())

    @staticmethod
    def _functions(
        library: ctypes.CDLL,
        name: str,
        *arguments: type,
        dtypes: Mapping[torch.dtype, str] = _NAMES,
        result: type | None = None,
    ) -> "dict[torch.dtype, ctypes._NamedFuncPointer]":
        found = {}
        for dtype, suffix in dtypes.items():
            function = getattr(library, f"inlay_{name}_{suffix}")
            function.argtypes, function.restype = arguments, result
            found[dtype] = function
        return found

    @staticmethod
    def serve(dtype: torch.dtype) -> bool:
        """Return True if there are kernels for `dtype`."""
        return dtype in _NAMES

    def attends(self, dtype: torch.dtype) -> bool:
        """Return True if `paged_attention` reads `dtype`."""
        return dtype in self._attention

    def paged_attention(
        self,
        out: Tensor,
        query: Tensor,
        keys: Tensor,
        values: Tensor,
        shape: AttentionShape,
        scaling: float,
        softcap: float,
        sinks: Tensor | None,
        scratch: Callable[[int], Tensor],
    ) -> None:
        """Attend to the positions that each query sees; write to `out`.

        A position of a prompt has the same bits whatever chunk it comes in, and with
        `shape.invariant` those that it would have if it decoded. Decoding reads keys and values
        where they lie, but for some CPUs in another order of sums: there it then takes longer.

        Args:
            out: [T, Q, value size], contiguous.
            query: [T, Q, key size], the last dimension contiguous.
            keys: [H, N, P, key size], contiguous; P is a multiple of 16.
            values: [H, N, P, value size], contiguous, or the first part of `keys`.
            shape: sequences, queries and window.
            scaling: factor of the scores.
            softcap: scores become `softcap * tanh(score / softcap)`; 0 for none.
            sinks: [Q] float32, one more score of each head, whose value is zero; None for none.
            scratch: gives memory of so many bytes until the call returns.
        """
        heads, num_pages, page_size, key_size = keys.shape
        call = _PagedAttention(
            query.data_ptr(), keys.data_ptr(), values.data_ptr(), out.data_ptr(),
            shape.block_table.data_ptr(), shape.spans.data_ptr(), shape.rows.data_ptr(),
            shape.counts.data_ptr(), shape.contexts.data_ptr(), shape.ends.data_ptr(),
            None if sinks is None else sinks.data_ptr(), None, query.stride(0), query.stride(1),
            shape.block_table.shape[1], len(shape.spans), shape.decoding, heads,
            query.shape[1] // heads, num_pages, page_size, key_size, values.shape[3],
            values.stride(2), shape.window, scaling, softcap, torch.get_num_threads(),
            shape.invariant,
        )  # fmt: skip
        memory = scratch(self._attention_bytes[query.dtype](ctypes.byref(call)))
        call.workspace = memory.data_ptr()
        self._attention[query.dtype](ctypes.byref(call))

    def copy_pages(
        self, table: PageTable, pages: Tensor, records: Tensor, *, to_pages: bool
    ) -> None:
        """Copy pages into records, or these into pages.

        Args:
            table: what the pages are of.
            pages: [R] int64, page of each record.
            records: [R, bytes] of any dtype, each row contiguous: the page of each tensor in
                order, head by head.
            to_pages: the direction.
        """
        call = _CopyPages(
            table.addresses.data_ptr(), table.heads.data_ptr(), table.runs.data_ptr(),
            pages.data_ptr(), records.data_ptr(), len(table.runs), table.num_pages, len(pages),
            records.stride(0) * records.element_size(), to_pages,
        )  # fmt: skip
        self._copy_pages(ctypes.byref(call))

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

    def product_rows(self, panels: Panels) -> int:
        """Return the maximum number of rows for which `product` is faster than oneDNN."""
        if self._tiles:
            return _TILE_ROWS if self._fit_tiles(panels) else _VECTOR_ROWS
        return ALL_ROWS if self._pairs else _VECTOR_ROWS

    def invariant_product(self, panels: Panels) -> bool:
        """Return True if `product` takes any number of rows, and each has the same bits in all."""
        return self._fit_tiles(panels) if self._tiles else self._pairs

    @staticmethod
    def _fit_tiles(panels: Panels) -> bool:
        return panels.width == 32 and panels.inputs % 32 == 0

    def product(self, x: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
        """Multiply `x` [..., inputs], bfloat16, with a packed weight; returns [..., outputs].

        `x` has at most `product_rows` rows; any number where `invariant_product` is true.

        `bias` is [outputs] bfloat16, contiguous.
        """
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], panels.outputs)
        call = _PackedProduct(
            x.data_ptr(), panels.address, None if bias is None else bias.data_ptr(), out.data_ptr(),
            x.numel() // panels.inputs, panels.inputs, panels.outputs, panels.width,
            torch.get_num_threads(), panels.invariant,
        )  # fmt: skip
        self._product(ctypes.byref(call))
        return out

    def quantised_product_rows(self) -> int:
        """Return the maximum number of rows for which `quantised_product` is the fastest way."""
        return _TILE_ROWS if self._tiles else ALL_ROWS

    @property
    def invariant_quantised_product(self) -> bool:
        """True if the bits of a row of `quantised_product` do not depend on the number of rows."""
        return self._pairs

    @property
    def invariance_is_free(self) -> bool:
        """True if the fastest way of all products and of attention in bfloat16 is invariant."""
        return self._pairs and not self._tiles

    def quantised_product(self, x: Tensor, codes: Codes, bias: Tensor | None) -> Tensor:
        """Multiply `x` [..., inputs] with a quantised weight; returns [..., outputs].

        `bias` is [outputs] in the dtype of `x`, contiguous.
        """
        x = x.contiguous()
        out = x.new_empty(*x.shape[:-1], codes.outputs)
        self._call_quantised(self._quantised, out, codes, x, bias)
        return out

    def dequantised(self, codes: Codes, dtype: torch.dtype) -> Tensor:
        """Return the weight [outputs, inputs] in float32 or bfloat16."""
        out = torch.empty(codes.outputs, codes.inputs, dtype=dtype)
        self._call_quantised(self._dequantise, out, codes, None, None)
        return out

    @staticmethod
    def _call_quantised(
        functions: "dict[torch.dtype, ctypes._NamedFuncPointer]",
        out: Tensor,
        codes: Codes,
        x: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        call = _QuantisedProduct(
            None if x is None else x.data_ptr(), codes.words.data_ptr(), codes.scales.data_ptr(),
            None if codes.shifts is None else codes.shifts.data_ptr(),
            None if bias is None else bias.data_ptr(), out.data_ptr(),
            0 if x is None else x.numel() // codes.inputs, codes.inputs, codes.outputs,
            codes.group, codes.kind, torch.get_num_threads(),
        )  # fmt: skip
        functions[out.dtype](ctypes.byref(call))

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
        sizes = (_integer * parts)(*(up.shape[2] for up in ups))
        addresses = (_pointer * parts)(*(up.data_ptr() for up in ups))
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
        """Compute silu(gate) * up [..., I] of [..., 2 I] contiguous, gate then up."""
        size = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], size)
        self._silu[gate_up.dtype](
            out.data_ptr(), gate_up.data_ptr(), gate_up.numel() // (2 * size), size,
            torch.get_num_threads(),
        )  # fmt: skip
        return out

    def prepare(
        self,
        projected: Tensor,
        cosine: Tensor,
        sine: Tensor,
        norms: "tuple[Tensor, Tensor] | None",
        eps: float,
        slots: Tensor,
        keys: Tensor,
        values: Tensor,
        query_heads: int,
    ) -> Tensor:
        """Norm and rotate queries and keys, and store keys and values in their pages.

        Args:
            projected: [T, (Q + 2 H) * D] contiguous: query, key and value heads of each position.
            cosine: [T, R], of the rotary embedding, R <= D; halves, as in transformers' Llama.
            sine: likewise.
            norms: [D] float32 each, weights of the norms of query heads and key heads; None for no
                norms.
            eps: epsilon of the norms.
            slots: [stored] int64, for the first `stored` positions; the rest is padding.
            keys: [H, N, P, D] contiguous.
            values: likewise.
            query_heads: Q.

        Returns:
            The queries [T, Q, D].
        """
        heads, num_pages, page_size, size = keys.shape
        positions = projected.shape[0]
        query = projected.new_empty(positions, query_heads, size)
        call = _Prepare(
            projected.data_ptr(), cosine.data_ptr(), sine.data_ptr(),
            None if norms is None else norms[0].data_ptr(),
            None if norms is None else norms[1].data_ptr(), slots.data_ptr(), query.data_ptr(),
            keys.data_ptr(), values.data_ptr(), positions, len(slots), query_heads, heads, size,
            cosine.shape[-1], num_pages * page_size, eps, torch.get_num_threads(),
        )  # fmt: skip
        self._prepare[projected.dtype](ctypes.byref(call))
        return query


@cache
def kernels() -> Kernels | None:
    """Return this process's kernels, compiled at the first call; None if not available."""
    found = [load(name) for name in _LIBRARIES]
    libraries = [library for library in found if library is not None]
    return Kernels(*libraries) if len(libraries) == len(found) else None
