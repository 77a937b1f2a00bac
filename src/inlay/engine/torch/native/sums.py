"""Keyed sums of bytes: what a checksum is made of where hashing all of them costs too much.

Bytes are cut into blocks of 4096, the last one filled with zeros, and a block into words w of 64
bits, little endian. With a key word k for each, the halves of w and k are added modulo 2^32, and
the product of the two is added to w. The sums of these modulo 2^64, over each eighth word, are the
eight words of a block. A change stays unseen with a probability of 2^-32 or less over random keys.

The product is NH of Black, Halevi, Krawczyk, Krovetz, Rogaway, "UMAC: Fast and Secure Message
Authentication" (1999); adding the word to it is from XXH3 (Collet, 2019).
"""

import ctypes
from functools import cache
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from blake3 import blake3

from inlay.engine.torch.native.build import load

BLOCK_BYTES = 4096
SUM_BYTES = 64
"""Bytes of the sums of a block."""

Bytes: TypeAlias = npt.NDArray[np.uint8]


class Sums:
    """Sums with one key.

    Args:
        key: 32 bytes.
    """

    def __init__(self, key: bytes) -> None:
        self._key = np.frombuffer(blake3(b"sums", key=key).digest(BLOCK_BYTES), np.uint8)
        self._library = _library()

    def __call__(self, rows: Bytes) -> Bytes:
        """Return the sums of each of `rows` [n, bytes], whose bytes are contiguous.

        uint8 [n, blocks * SUM_BYTES]. Releases Python's lock.
        """
        count, size = rows.shape
        blocks = -(-size // BLOCK_BYTES)
        if self._library is None:
            return _sums(rows, self._key)
        out = np.empty((count, blocks * SUM_BYTES), np.uint8)
        self._library.inlay_sums(
            out.ctypes.data, rows.ctypes.data, self._key.ctypes.data, count, rows.strides[0], size
        )
        return out


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
    library = load("sums")
    if library is not None:
        pointer, integer = ctypes.c_void_p, ctypes.c_int64
        library.inlay_sums.argtypes = (pointer, pointer, pointer, integer, integer, integer)
        library.inlay_sums.restype = None
    return library


__all__ = ["BLOCK_BYTES", "SUM_BYTES", "Bytes", "Sums"]
