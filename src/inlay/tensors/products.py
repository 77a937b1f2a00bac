"""Products of matrices that are computed in the calling thread alone.

OpenBLAS computes large ones on all cores, whose threads wait for each other: where others want the
cores, as in a frontend, each wait is some ms.
"""

import math
from typing import Any

import numpy as np
import numpy.typing as npt

MULTIPLICATIONS = 1 << 18
"""Of one product at most, up to which OpenBLAS starts no threads."""

Array = npt.NDArray[Any]


def small_products(rows: Array, others: Array) -> Array:
    """Return the products of `rows` [Q, D] with each of some matrices [K, N, D]: [K, Q, N].

    Q x N x D is at most `MULTIPLICATIONS`.
    """
    if len(rows) > 1 and others.shape[1] > 1:
        found: Array = np.matmul(rows, others.transpose(0, 2, 1))
    else:
        # Products with a vector are threaded from other sizes on: this one is not of OpenBLAS.
        found = np.einsum("qd,knd->kqn", rows, others)
    return found


def product(rows: Array, others: Array) -> Array:
    """Return the product of `rows` [Q, D] with `others` [N, D]: [Q, N], of the dtype of `rows`."""
    width = max(1, rows.shape[1])
    asked = max(1, min(len(rows), math.isqrt(MULTIPLICATIONS // width)))
    step = max(1, MULTIPLICATIONS // (asked * width))
    even = len(others) // step * step
    pieces = others[:even].reshape(-1, step, rows.shape[1])
    found = np.empty((len(rows), len(others)), rows.dtype)
    for start in range(0, len(rows), asked):
        part, to = rows[start : start + asked], found[start : start + asked]
        to[:, :even] = small_products(part, pieces).transpose(1, 0, 2).reshape(len(part), even)
        to[:, even:] = small_products(part, others[None, even:])[0]
    return found
