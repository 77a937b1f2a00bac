"""Outputs of an answer beside one dense vector: sparse, of tokens, and classes of tokens."""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from inlay.api.openai.embeddings.encoding import Encoding
from inlay.api.openai.embeddings.gathering import Gathered, activated, normalized
from inlay.api.openai.embeddings.roles import DOCUMENT
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.embedding.bundles import parts_of
from inlay.embedding.cache import Bundle
from inlay.messages.card import EmbeddingCard
from inlay.messages.pooling import OutputCard
from inlay.messages.prompt import Prompt, Tokens

MOST_NUMBERS = 512 * 1024
"""Numbers of vectors for positions that an answer has in JSON, about 7 MB."""


class PositionVectors(NamedTuple):
    """Vectors of some positions of an input.

    Attributes:
        values: [kept, size].
        positions: [kept], of the input.
    """

    values: npt.NDArray[np.float32]
    positions: npt.NDArray[np.int64]


def rows_of(
    found: Gathered,
    output: OutputCard,
    card: EmbeddingCard,
    role: str | None,
    normalize: bool | None = None,
) -> PositionVectors:
    """Return an input's vectors, without those of positions that its role leaves out.

    Args:
        found: the input.
        output: `tokens` or `token_labels`, of `card`.
        card: of the model.
        role: of the input; a document's where it is None.
        normalize: give vectors length 1; the model's setting if None.
    """
    values = found.bundle[output.name]
    positions = np.arange(len(values))
    kept = np.ones(len(values), np.bool_)
    for begin in found.piece.begins:
        kept[begin : begin + output.first] = False
    plan = card.roles.get(role or DOCUMENT)
    if output.name == "tokens" and plan is not None and plan.skip:
        ids = np.array([-1 if id_ is None else id_ for id_ in ids_of(found.piece.prompt)])
        kept &= ~np.isin(ids, plan.skip)
    positions = positions[kept]
    values = values[kept]
    if output.normalize if normalize is None else normalize:
        values = normalized(values)
    return PositionVectors(values, positions)


def comparable(
    found: Gathered, names: Sequence[str], card: EmbeddingCard, role: str | None
) -> Bundle:
    """Return outputs of an input as similarity takes them.

    They are as the model gives them, but of tokens those that the role leaves out, and length 1 if
    the model sets it.
    """
    arrays: dict[str, npt.NDArray[Any]] = {}
    for name in names:
        if name == "tokens":
            output = next(each for each in card.outputs if each.name == name)
            arrays[name] = rows_of(found, output, card, role).values
        else:
            arrays |= parts_of(found.bundle, name)
    return arrays


def ids_of(prompt: Prompt) -> list[int | None]:
    """Return the token id of each position, None of embeddings and media."""
    found: list[int | None] = []
    for segment in prompt.segments:
        ids = segment.ids if isinstance(segment, Tokens) else [None] * len(segment)
        found += ids
    return found


def output_shown(
    found: Gathered,
    output: OutputCard,
    card: EmbeddingCard,
    role: str | None,
    encoding: Encoding,
    request: EmbeddingRequest,
) -> object:
    """Return what an input's item has under the name of an output other than `dense`.

    Sparse vectors have indices, ascending, and their weights; the others the id and the characters
    of each position.
    """
    if output.name == "sparse":
        return {
            part: encoding.shown(found.bundle[f"sparse.{part}"]) for part in ("indices", "values")
        }
    if output.name == "token_labels":
        rows = rows_of(found, output, card, role, normalize=False)
        return _labels(rows, found, output, request.use_activation)
    rows = rows_of(found, output, card, role, request.normalize)
    return encoding.vectors("data", rows.values) | _places(rows.positions, found)


def _labels(
    rows: PositionVectors, found: Gathered, output: OutputCard, use_activation: bool | None
) -> list[dict[str, Any]]:
    """Return the likeliest class of each position that is text."""
    scores = activated(rows.values, "softmax", use_activation)
    best = scores.argmax(axis=1)
    places = _places(rows.positions, found)
    ranges = places.get("ranges")
    shown = []
    for number, (label, position) in enumerate(zip(best, rows.positions, strict=True)):
        item = {
            "position": int(position),
            "label": output.labels[label] if output.labels else str(label),
            "score": float(scores[number, label]),
            "token_id": places["token_ids"][number],
        }
        if ranges is not None:
            if ranges[number] is None:
                continue
            item["range"] = ranges[number]
        shown.append(item)
    return shown


def _places(positions: "npt.NDArray[np.int64]", found: Gathered) -> dict[str, Any]:
    ids, ranges = ids_of(found.piece.prompt), found.piece.ranges
    places: dict[str, Any] = {"token_ids": [ids[position] for position in positions]}
    if ranges is not None:
        places["ranges"] = [ranges[position] for position in positions]
    return places


def about_inputs(found: Sequence[Gathered]) -> list[Mapping[str, Any]]:
    """Return what every item says of its input."""
    return [
        {"input_tokens": len(each.piece.prompt), "truncated": each.piece.truncated}
        for each in found
    ]
