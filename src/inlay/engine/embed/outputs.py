"""Heads: what each output of a plan makes of the last hidden states of a batch.

A head gets the states of some sequences laid end to end, and gives a bundle for each. It reads one
sequence's positions at a time: nothing depends on the rest of the batch.
"""

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, Protocol, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.embedding.cache import Bundle
from inlay.embedding.plan import Finish
from inlay.embedding.static import sparse
from inlay.engine.embed.vector_model import EmbedInput
from inlay.messages.pooling import CHUNKS

TILE = 4096
"""Columns of the vocabulary that are computed at a time: logits of all would be the largest
activation of the model, 122 KB a position of BERT and 1 MB of XLM-R."""

Logits: TypeAlias = Callable[[Tensor], Tensor]
"""From states [T, C] to what a model's own head makes of each position [T, N]."""


class Head(Protocol):
    """Makes one output."""

    def __call__(self, states: Tensor, asked: Sequence[EmbedInput]) -> list[Bundle]:
        """Return the bundle of each sequence; `states` are [T, C], those of `asked`."""


class One:
    """One vector of each sequence: [S, C] of `pooled`, [T, C] and lengths to [S, N].

    Attributes:
        pooled: makes the vectors.
    """

    def __init__(self, name: str, pooled: Callable[[Tensor, Sequence[int]], Tensor]) -> None:
        self._name = name
        self.pooled = pooled

    def __call__(self, states: Tensor, asked: Sequence[EmbedInput]) -> list[Bundle]:
        rows = self.pooled(states, lengths_of(asked)).float().cpu().numpy()
        return [{self._name: row} for row in rows]


class Spans:
    """One vector of each span of a sequence's positions, made as `One` makes one of all."""

    def __init__(self, pooled: Callable[[Tensor, Sequence[int]], Tensor]) -> None:
        self._pooled = pooled

    def __call__(self, states: Tensor, asked: Sequence[EmbedInput]) -> list[Bundle]:
        parts = torch.split(states, lengths_of(asked))
        found = []
        for part, each in zip(parts, asked, strict=True):
            lengths = [stop - start for start, stop in pairwise(each.spans)]
            rows = self._pooled(part[each.spans[0] :], lengths)
            found.append({CHUNKS: rows.float().cpu().numpy()})
        return list(found)


class Each:
    """One vector, or the logits of classes, for each position."""

    def __init__(self, name: str, logits: Logits) -> None:
        self._name = name
        self._logits = logits

    def __call__(self, states: Tensor, asked: Sequence[EmbedInput]) -> list[Bundle]:
        rows = self._logits(states).float().cpu()
        return [{self._name: part.numpy()} for part in torch.split(rows, lengths_of(asked))]


class SpladeWeights:
    """Weights of the whole vocabulary, as SPLADE has them.

    The largest logit of each column, or the sum of what follows from all, computed in tiles of
    columns. What follows grows with the logit, so it is computed once for each sequence.
    """

    def __init__(self, transform: Logits, decoder: nn.Linear, finish: Finish, *, sums: bool):
        self._transform = transform
        self._weight: Tensor = decoder.weight
        self._bias: Tensor | None = decoder.bias
        self._finish = finish
        self._sums = sums

    def __call__(self, states: Tensor, asked: Sequence[EmbedInput]) -> list[Bundle]:
        lengths = lengths_of(asked)
        states = self._transform(states)
        found: list[tuple[Tensor, Tensor, Tensor]] = []
        for start in range(0, len(self._weight), TILE):
            tile = slice(start, start + TILE)
            bias = None if self._bias is None else self._bias[tile]
            parts = torch.split(F.linear(states, self._weight[tile], bias), lengths)
            if self._sums:
                weights = torch.stack([self._finished(part).sum(0) for part in parts])
            else:
                weights = self._finished(torch.stack([part.amax(0) for part in parts]))
            # What is not a number is kept, and found later.
            rows, columns = torch.nonzero(weights, as_tuple=True)
            found.append((rows.cpu(), columns.cpu() + start, weights[rows, columns].cpu()))
        rows, columns, weights = (torch.cat(list(each)) for each in zip(*found, strict=True))
        order = torch.argsort(rows, stable=True)
        counts = torch.bincount(rows, minlength=len(asked)).tolist()
        return [
            sparse(own_columns.numpy(), own.numpy(), each.max_active)
            for own_columns, own, each in zip(
                torch.split(columns[order], counts),
                torch.split(weights[order], counts),
                asked,
                strict=True,
            )
        ]

    def _finished(self, logits: Tensor) -> Tensor:
        weights = logits.float().relu()
        for _ in range(self._finish.count("log1p")):
            weights = weights.log1p()
        return weights


class Ids:
    """A weight for each id that stands in the text, the largest of its positions, as BGE-M3's.

    Args:
        weights: [T, C] to [T, 1].
        special: ids that have none.
    """

    def __init__(self, weights: Logits, special: Sequence[int]) -> None:
        self._weights = weights
        self._special = np.array(special, np.int64)

    def __call__(self, states: Tensor, asked: Sequence[EmbedInput]) -> list[Bundle]:
        parts = torch.split(self._weights(states)[:, 0].float().cpu(), lengths_of(asked))
        found = []
        for part, each in zip(parts, asked, strict=True):
            ids, places = np.unique(np.array(each.prompt.token_ids()), return_inverse=True)
            weights = np.zeros(len(ids), np.float32)
            np.maximum.at(weights, places, part.numpy())
            kept = (weights != 0) & ~np.isin(ids, self._special)
            found.append(sparse(ids[kept], weights[kept], each.max_active))
        return found


def lengths_of(asked: Sequence[EmbedInput]) -> list[int]:
    """Return the positions of each sequence."""
    return [len(each.prompt) for each in asked]


def all_outputs(
    heads: dict[str, Head], states: Tensor, asked: Sequence[EmbedInput]
) -> list[Bundle]:
    """Return what each sequence wants; a head sees those that want its output.

    Args:
        heads: by output, the first for sequences that name none.
        states: [T, C], of all sequences.
        asked: the sequences.
    """
    first = next(iter(heads))
    wanted = [each.outputs or (first,) for each in asked]
    found: list[dict[str, Any]] = [{} for _ in asked]
    parts = None
    for name, head in heads.items():
        places = [place for place, names in enumerate(wanted) if name in names]
        if not places:
            continue
        own = states
        if len(places) < len(asked):
            parts = parts or torch.split(states, lengths_of(asked))
            own = torch.cat([parts[place] for place in places])
        made = head(own, [asked[place] for place in places])
        for place, bundle in zip(places, made, strict=True):
            found[place] |= bundle
    return list(found)
