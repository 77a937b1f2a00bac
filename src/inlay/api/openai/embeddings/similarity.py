"""Likeness of queries and documents: cosine, dot product of sparse vectors, and MaxSim."""

import math
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from inlay.api.openai.embeddings.gathering import Array
from inlay.base.errors import InvalidRequestError
from inlay.base.pace import yield_gil
from inlay.embedding.cache import Bundle
from inlay.tensors.products import MULTIPLICATIONS, small_products

MAX_MULTIPLICATIONS: Final = 128 * 1024**3
"""Multiplications that the scores of a request may take: some seconds of one core."""

_ROWS = 512
"""Vectors of a query, and of a document, that are compared at a time at most: 1 MB."""

_PAIR = 1024
"""Bytes of other work that take as long as what a pair costs beside its multiplications."""


class Comparison:
    """Queries with their documents. A pair that is there several times is scored once.

    Args:
        queries: one, or as many as documents, as `outputs.comparable` returns them.
        documents: at least one, likewise. The same bundle is the same document.
        name: of the output that is compared.

    Attributes:
        multiplications: that the scores take.
        size: of the work, as `Server.run_prepared` takes it.
        num_bytes: that `scores` takes at most beside what it is given.
    """

    def __init__(self, queries: Sequence[Bundle], documents: Sequence[Bundle], name: str) -> None:
        shared = [*queries] * len(documents) if len(queries) == 1 else queries
        pairs = list(zip(shared, documents, strict=True))
        self._name = name
        self._keys = [(id(query), id(document)) for query, document in pairs]
        self._pairs = dict(zip(self._keys, pairs, strict=True))
        self.multiplications = sum(self._cost(*pair) for pair in self._pairs.values())
        self.size = self.multiplications + _PAIR * len(self._pairs)
        arrays = [each[self._port] for pair in self._pairs.values() for each in pair]
        if name == "tokens":
            # Two slabs, if they do not lie even, and their products.
            self.num_bytes = 4 * _ROWS * (2 * max(each.shape[1] for each in arrays) + _ROWS)
        else:
            # Of a pair some copies, of 64 bits.
            self.num_bytes = 64 * max(each.size for each in arrays)

    @property
    def _port(self) -> str:
        return "sparse.values" if self._name == "sparse" else self._name

    def _cost(self, query: Bundle, document: Bundle) -> int:
        asked, found = query[self._port], document[self._port]
        return len(asked) * found.size if self._name == "tokens" else min(asked.size, found.size)

    def check(self, first: str, second: str) -> None:
        """Raise `InvalidRequestError` for more than `MAX_MULTIPLICATIONS`.

        Args:
            first: field of the queries.
            second: field of the documents.
        """
        if self.multiplications > MAX_MULTIPLICATIONS:
            raise InvalidRequestError(
                f"comparing {first} with {second} takes {self.multiplications} multiplications "
                "(vectors of a query x those of its document x numbers of a vector, of all pairs); "
                f"at most {MAX_MULTIPLICATIONS} are allowed: give fewer, or shorter ones on either "
                "side",
                param=second,
            )

    def scores(self, *, mean: bool = False) -> list[float]:
        """Return the score of each document with its query. CPU work.

        Args:
            mean: a score by MaxSim is the mean over a query's vectors, else their sum.
        """
        score = _SCORES[self._name]
        found = {}
        for key, (query, document) in self._pairs.items():
            yield_gil()
            found[key] = score(query, document)
            if mean and self._name == "tokens":
                found[key] /= max(1, len(query["tokens"]))
        return [found[key] for key in self._keys]


def _cosine(query: Bundle, document: Bundle) -> float:
    """Return 0 where one of them is of zeros alone."""
    asked, found = (each["dense"].astype(np.float64) for each in (query, document))
    lengths = np.sqrt(_inner(asked, asked)) * np.sqrt(_inner(found, found))
    return float(_inner(asked, found) / lengths) if lengths else 0.0


def _inner(one: npt.NDArray[Any], other: npt.NDArray[Any]) -> Any:
    return np.einsum("d,d", one, other)  # that of OpenBLAS has threads for long ones


def _dot(query: Bundle, document: Bundle) -> float:
    """Return the product of the weights that both have; their indices ascend."""
    short, long = sorted((query, document), key=lambda each: each["sparse.indices"].size)
    wanted, given = short["sparse.indices"], long["sparse.indices"]
    places = np.searchsorted(given, wanted)
    places[places == given.size] = 0
    common = given[places] == wanted if given.size else np.zeros(wanted.size, bool)
    weights = short["sparse.values"][common], long["sparse.values"][places[common]]
    return float(_inner(*weights))


def _max_sim(query: Bundle, document: Bundle) -> float:
    return max_sim(query["tokens"], document["tokens"])


_SCORES: dict[str, Callable[[Bundle, Bundle], float]] = {
    "dense": _cosine,
    "sparse": _dot,
    "tokens": _max_sim,
}


def max_sim(query: Array, document: Array) -> float:
    """Return the sum over rows of `query` [Q, D] of their largest product in `document` [N, D].

    A document, or a query, without a vector has the score 0.
    """
    total = 0.0
    width = query.shape[1]
    asked = max(1, min(_ROWS, len(query), math.isqrt(MULTIPLICATIONS // width)))
    found = max(1, min(_ROWS, MULTIPLICATIONS // (asked * width)))
    for rows in _slabs(query if len(document) else query[:0], asked):
        best = np.full(len(rows), -np.inf, np.float32)
        even, step = len(document) // found * found, _ROWS // found * found
        for others in (*_slabs(document[:even], step), *_slabs(document[even:], found)):
            products = small_products(rows, others.reshape(-1, min(found, len(others)), width))
            np.maximum(best, products.max(axis=(0, 2)), out=best)
            yield_gil()
        total += float(best.sum(dtype=np.float64))
    return total


def _slabs(rows: Array, step: int) -> Iterator[Array]:
    for start in range(0, len(rows), step):
        yield rows[start : start + step]
