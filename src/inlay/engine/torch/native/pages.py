"""Pages copied into records and out of them, and keyed sums of these.

A checksum is made of the sums where hashing all bytes costs too much. Bytes are cut into blocks of
16,384, the last one filled with zeros, and a block into words w of 64 bits, little endian. With a
key word k for each, the halves of w and k are added modulo 2^32, and the product of the two is
added to w. The sums of these modulo 2^64, over each eighth word, are the eight words of a block. A
change stays unseen with a probability of 2^-32 or less over random keys.

The product is NH of Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC: Fast and Secure Message
Authentication" (1999); adding the word to it is from XXH3 (Collet, 2019).
"""

import ctypes
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from blake3 import blake3
from torch import Tensor

from inlay.engine.torch.native.build import load
from inlay.engine.torch.native.calls import integer, pointer, structure

BLOCK_BYTES = 16384
SUM_BYTES = 64
"""Bytes of the sums of a block."""

INFINITIES: Mapping[torch.dtype, int] = {
    torch.bfloat16: 0x7F80,
    torch.float16: 0x7C00,
    torch.float32: 0x7F800000,
}
"""Of a dtype: the bits of infinity."""

Bytes: TypeAlias = npt.NDArray[np.uint8]

_CopyPages = structure(
    "_CopyPages", runs=pointer, sizes=pointer, steps=pointer, infinities=pointer, pages=pointer,
    records=pointer, key=pointer, sums=pointer, count=integer, num_records=integer, stride=integer,
    to_pages=ctypes.c_int32,
)  # fmt: skip
_STRIPE_BYTES = 64
"""Runs are of whole ones."""


class PageRuns(NamedTuple):
    """Addresses of pages of tensors [H, N, ...] that are copied together; all but N may differ.

    Attributes:
        addresses: [runs] int64, page 0 of each head of each tensor in order.
        sizes: [runs] int64, bytes that are copied of a page.
        steps: [runs] int64, bytes from one page to the next.
        infinities: [runs] int64, bits of infinity.
    """

    addresses: Tensor
    sizes: Tensor
    steps: Tensor
    infinities: Tensor

    @classmethod
    def of(cls, tensors: Sequence[Tensor]) -> "PageRuns | None":
        """Of tensors on the CPU, which must live for as long as this is used.

        A page of a head is contiguous, and pages follow each other at equal distances. None where
        the kernel does not copy them.
        """
        found = [
            (
                head.data_ptr(),
                head[0].numel() * head.element_size(),
                head.stride(0) * head.element_size(),
                INFINITIES.get(head.dtype, 0),
            )
            for tensor in tensors
            for head in tensor
        ]
        if not all(size % _STRIPE_BYTES == 0 and infinity for _, size, _, infinity in found):
            return None
        return cls(*torch.tensor(found, dtype=torch.int64).T.contiguous())


class Sums:
    """Sums with one key, alone or while pages are copied. Releases Python's lock.

    Args:
        key: 32 bytes.

    Attributes:
        copies: pages can be copied too.
    """

    def __init__(self, key: bytes) -> None:
        self._key = np.frombuffer(blake3(b"sums", key=key).digest(BLOCK_BYTES), np.uint8)
        self._library = _library()
        self.copies = self._library is not None

    def __call__(self, rows: Bytes) -> Bytes:
        """Return the sums of each of `rows` [n, bytes], whose bytes are contiguous.

        uint8 [n, blocks * SUM_BYTES].
        """
        count, size = rows.shape
        if self._library is None:
            return _sums(rows, self._key)
        out = _empty(count, size)
        self._library.inlay_sums(
            out.ctypes.data, rows.ctypes.data, self._key.ctypes.data, count, rows.strides[0], size
        )
        return out

    def read(self, runs: PageRuns, pages: Sequence[int], data: Bytes) -> Bytes:
        """Copy pages to rows of `data` [n, bytes], whose bytes are contiguous; return its sums.

        A row has the runs of a page in order.
        """
        return self._copied(runs, pages, data, to_pages=False)[1]

    def write(self, runs: PageRuns, pages: Sequence[int], data: Bytes) -> tuple[int, Bytes]:
        """Copy leading rows of `data`, as of `read`, to pages, as long as they are finite.

        Returns:
            How many they are, and the sums of these. Into one page more some of a row may have been
            copied, finite too.
        """
        count, sums = self._copied(runs, pages, data, to_pages=True)
        return count, sums[:count]

    def _copied(
        self, runs: PageRuns, pages: Sequence[int], data: Bytes, *, to_pages: bool
    ) -> tuple[int, Bytes]:
        if self._library is None:
            raise RuntimeError("there is no kernel that copies pages")
        index = np.array(pages, np.int64)
        out = _empty(*data.shape)
        call = _CopyPages(
            runs.addresses.data_ptr(), runs.sizes.data_ptr(), runs.steps.data_ptr(),
            runs.infinities.data_ptr(), index.ctypes.data, data.ctypes.data,
            self._key.ctypes.data, out.ctypes.data, len(runs.sizes), len(index), data.strides[0],
            to_pages,
        )  # fmt: skip
        return self._library.inlay_copy_pages(ctypes.byref(call)), out


def _empty(count: int, size: int) -> Bytes:
    return np.empty((count, -(-size // BLOCK_BYTES) * SUM_BYTES), np.uint8)


def _sums(rows: Bytes, key: Bytes) -> Bytes:
    count, size = rows.shape
    words = np.pad(rows, ((0, 0), (0, -size % BLOCK_BYTES))).view("<u8")
    words = words.reshape(count, -1, BLOCK_BYTES // SUM_BYTES, SUM_BYTES // 8)
    keys = key.view("<u8").reshape(words.shape[2:])
    half = np.uint64(0xFFFFFFFF)
    low = (words + keys) & half
    high = ((words >> np.uint64(32)) + (keys >> np.uint64(32))) & half
    sums: npt.NDArray[np.uint64] = (words + low * high).sum(axis=2, dtype="<u8")
    return sums.reshape(count, -1).view(np.uint8)


@cache
def _library() -> ctypes.CDLL | None:
    library = load("pages")
    if library is not None:
        library.inlay_sums.argtypes = (pointer, pointer, pointer, integer, integer, integer)
        library.inlay_sums.restype = None
        library.inlay_copy_pages.argtypes, library.inlay_copy_pages.restype = (pointer,), integer
    return library
