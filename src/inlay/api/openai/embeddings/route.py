"""`POST /v1/embeddings`."""

import time
from typing import NamedTuple

import msgspec

from inlay.api.fields import answer_id, check_common
from inlay.api.openai.embeddings.encoding import About, Answer, Encoding
from inlay.api.openai.embeddings.gathering import (
    Array,
    embedding_card,
    normalized,
    vectors_of,
)
from inlay.api.openai.embeddings.prompts import in_prompts, inputs_of
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.card import EmbeddingCard
from inlay.errors import InvalidRequestError
from inlay.http.parsed_request import read_request
from inlay.http.server import Call
from inlay.request import Task

_decoder = msgspec.json.Decoder(EmbeddingRequest)


class Shown(NamedTuple):
    """Post-processing of the model's vectors.

    Attributes:
        dimensions: number of first elements that are kept, or None for all.
        normalize: True if they get length 1.
    """

    dimensions: int | None
    normalize: bool

    @classmethod
    def of(cls, request: EmbeddingRequest, card: EmbeddingCard, model: str) -> "Shown":
        """Return the options of a request.

        Raises `InvalidRequestError` for options that the model does not allow.
        """
        asked = request.dimensions
        if asked is not None and asked != card.size:
            allowed = card.any_dimensions and 0 < asked <= card.size
            if not allowed and asked not in card.dimensions:
                raise InvalidRequestError(
                    f"dimensions may be {_allowed(card)} of the model `{model}`, got {asked}",
                    param="dimensions",
                )
        if (
            None not in (request.normalize, request.use_activation)
            and request.normalize != request.use_activation
        ):
            raise InvalidRequestError(
                "normalize and use_activation say different things", param="normalize"
            )
        normalize = request.use_activation if request.normalize is None else request.normalize
        # A shortened vector is only meaningful with length 1.
        return cls(
            asked, normalizes(card, normalize, model, "normalize", default=asked is not None)
        )


def normalizes(
    card: EmbeddingCard, asked: bool | None, model: str, param: str, *, default: bool = False
) -> bool:
    """Return True if vectors get length 1: `asked`, or if None the model's or `default`.

    Raises:
        InvalidRequestError: `asked` is False, but the engine always normalises.
    """
    normalize = card.normalize or default if asked is None else asked
    if card.unit and not normalize:
        raise InvalidRequestError(
            f"{param} may only be true: the engine of the model `{model}` gives vectors length 1",
            param=param,
        )
    return normalize


def _allowed(card: EmbeddingCard) -> str:
    if card.any_dimensions:
        return f"1 to {card.size}"
    return " or ".join(map(str, (*card.dimensions, card.size)[-8:]))


async def embeddings(call: Call) -> None:
    """Answer with the embeddings of texts, ids, chats or tensor files."""
    server = call.server
    incoming = await read_request(call, _decoder, in_prompts)
    request = incoming.parsed.request
    check_common(call, request)
    id_ = answer_id("embd-", request.request_id)
    model = server.model(request.model, Task.EMBED)
    card = embedding_card(model)
    shown, encoding = Shown.of(request, card, model.name), Encoding.of(request)
    inputs = await inputs_of(call, incoming, model)
    encoding.check_count(len(inputs))
    size = max(incoming.size, 4 * len(inputs) * card.size)
    del incoming
    found, usage = await vectors_of(call, model, request, inputs, encoding.element_bytes)
    about = About(id_, int(time.time()), model.name, usage)
    answer = await server.prepare(size, _answer, found, shown, encoding, about)
    await call.bytes(answer.body, answer.media, more=answer.headers)


def _answer(vectors: Array, shown: Shown, encoding: Encoding, about: About) -> Answer:
    """Return the response. CPU work."""
    vectors = vectors[:, : shown.dimensions]
    return encoding.answer(normalized(vectors) if shown.normalize else vectors, about)
