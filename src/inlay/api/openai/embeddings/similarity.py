"""Likeness of queries and documents: cosine, dot product of sparse vectors, and MaxSim."""

from collections.abc import Iterator, Sequence
from typing import TypeVar

import numpy as np

from inlay.api.openai.embeddings.gathering import Array, normalized
from inlay.embedding.cache import Bundle

T = TypeVar("T")

_SLAB = 16 * 1024 * 1024
"""Numbers of documents, and of their products with a query, at a time: 64 MB of each."""


def similarities(
    queries: Sequence[Bundle], documents: Sequence[Bundle], name: str, *, mean: bool = False
) -> list[float]:
    """Return the score of each document with its query; one query may serve all. CPU work.

    Args:
        queries: one, or as many as documents, as `outputs.comparable` returns them.
        documents: at least one, likewise.
        name: of the output that is compared.
        mean: a score by MaxSim is the mean over a query's vectors, else their sum.
    """
    if name == "sparse":
        return _dots(queries, documents)
    if name == "tokens":
        return _max_sims(queries, documents, mean)
    asked, found = (
        normalized(np.stack([each[name] for each in side])) for side in (queries, documents)
    )
    scores: list[float] = np.einsum("ij,ij->i", np.broadcast_to(asked, found.shape), found).tolist()
    return scores


def compared_bytes(queries: Sequence[Bundle], documents: Sequence[Bundle], name: str) -> int:
    """Return the bytes that `similarities` takes at most beside what it is given."""
    numbers = sum(each[name].size for each in documents if name in each)
    if name != "tokens":
        return 4 * numbers
    rows = sum(len(each[name]) for each in documents)
    products = rows * max(len(each[name]) for each in queries)
    return 4 * (min(numbers, _SLAB) + min(products, _SLAB))


def _dots(queries: Sequence[Bundle], documents: Sequence[Bundle]) -> list[float]:
    scores = []
    for query, document in _paired(queries, documents):
        _, ours, theirs = np.intersect1d(
            query["sparse.indices"],
            document["sparse.indices"],
            assume_unique=True,
            return_indices=True,
        )
        weights = query["sparse.values"][ours], document["sparse.values"][theirs]
        scores.append(float(np.dot(*weights)))
    return scores


def _max_sims(queries: Sequence[Bundle], documents: Sequence[Bundle], mean: bool) -> list[float]:
    """Return the sum, or the mean, over a query's vectors of their largest product in a document.

    Documents that share a query are compared in slabs of whole documents.
    """
    asked = [each["tokens"] for each in queries]
    found = [each["tokens"] for each in documents]
    if len(asked) == 1:
        (query,) = asked
        most = max(1, _SLAB // max(1, *query.shape))
        scores = [score for slab in _slabs(found, most) for score in max_sim(query, slab)]
    else:
        scores = [
            max_sim(query, [document])[0] for query, document in zip(asked, found, strict=True)
        ]
    if not mean:
        return scores
    counts = [max(1, len(query)) for query, _ in _paired(asked, found)]
    return [score / count for score, count in zip(scores, counts, strict=True)]


def max_sim(query: Array, documents: Sequence[Array]) -> list[float]:
    """Return the sum over rows of `query` [Q, D] of their largest product with each of `documents`.

    A document, or a query, without a vector has the score 0.
    """
    counts = np.array([len(document) for document in documents])
    scores = np.zeros(len(documents), np.float64)
    some = counts > 0
    if some.any() and len(query):
        products = query @ np.concatenate(documents).T
        starts = np.cumsum(counts) - counts
        best = np.maximum.reduceat(products, starts[some], axis=1)
        scores[some] = best.sum(axis=0, dtype=np.float64)
    return [float(score) for score in scores]


def _slabs(documents: Sequence[Array], most: int) -> Iterator[list[Array]]:
    """Yield documents together that have at most `most` rows, or one with more."""
    slab: list[Array] = []
    rows = 0
    for document in documents:
        if slab and rows + len(document) > most:
            yield slab
            slab, rows = [], 0
        slab.append(document)
        rows += len(document)
    yield slab


def _paired(queries: Sequence[T], documents: Sequence[T]) -> Iterator[tuple[T, T]]:
    shared = [*queries] * len(documents) if len(queries) == 1 else queries
    return zip(shared, documents, strict=True)
