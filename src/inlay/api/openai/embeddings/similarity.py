"""Likeness of queries and documents: cosine, dot product of sparse vectors, and MaxSim."""

from collections.abc import Iterator, Sequence

import numpy as np

from inlay.api.openai.embeddings.gathering import Array, Gathered, normalized, stacked
from inlay.api.openai.embeddings.outputs import rows_of
from inlay.api.openai.embeddings.roles import DOCUMENT, QUERY
from inlay.messages.card import EmbeddingCard

_SLAB = 16 * 1024 * 1024
"""Products of MaxSim at a time: 64 MB."""


def similarities(
    queries: Sequence[Gathered], documents: Sequence[Gathered], name: str, card: EmbeddingCard
) -> list[float]:
    """Return the score of each document with its query; one query may serve all. CPU work.

    Args:
        queries: one, or as many as documents.
        documents: at least one.
        name: of the output that is compared.
        card: of the model.
    """
    if name == "sparse":
        return _dots(queries, documents)
    if name == "tokens":
        return _max_sims(queries, documents, card)
    asked, found = normalized(stacked(queries, name)), normalized(stacked(documents, name))
    scores: list[float] = np.einsum("ij,ij->i", np.broadcast_to(asked, found.shape), found).tolist()
    return scores


def _dots(queries: Sequence[Gathered], documents: Sequence[Gathered]) -> list[float]:
    scores = []
    for query, document in _paired(queries, documents):
        _, ours, theirs = np.intersect1d(
            query.bundle["sparse.indices"],
            document.bundle["sparse.indices"],
            assume_unique=True,
            return_indices=True,
        )
        weights = query.bundle["sparse.values"][ours], document.bundle["sparse.values"][theirs]
        scores.append(float(np.dot(*weights)))
    return scores


def _max_sims(
    queries: Sequence[Gathered], documents: Sequence[Gathered], card: EmbeddingCard
) -> list[float]:
    """Return the sum, or the mean, over a query's vectors of their largest product in a document.

    Documents that share a query are compared in slabs of whole documents.
    """
    output = next(each for each in card.outputs if each.name == "tokens")

    def vectors(each: Gathered, role: str) -> Array:
        return rows_of(each, output, card, role).values

    if len(queries) == 1:
        asked = vectors(queries[0], QUERY)
        most = max(1, _SLAB // max(1, len(asked)))
        found = [vectors(each, DOCUMENT) for each in documents]
        scores = [score for slab in _slabs(found, most) for score in max_sim(asked, slab)]
    else:
        scores = [
            max_sim(vectors(query, QUERY), [vectors(document, DOCUMENT)])[0]
            for query, document in zip(queries, documents, strict=True)
        ]
    return (
        scores
        if not output.mean
        else [
            score / max(1, len(vectors(query, QUERY)))
            for score, (query, _) in zip(scores, _paired(queries, documents), strict=True)
        ]
    )


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


def _paired(
    queries: Sequence[Gathered], documents: Sequence[Gathered]
) -> Iterator[tuple[Gathered, Gathered]]:
    shared = [*queries] * len(documents) if len(queries) == 1 else queries
    return zip(shared, documents, strict=True)
