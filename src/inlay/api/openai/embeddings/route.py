"""`POST /v1/embeddings`, and `/pooling` and `/classify` as in vLLM."""

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, NamedTuple, TypeAlias

import msgspec

from inlay.api.fields import answer_id, check_common
from inlay.api.openai.embeddings.encoding import About, EmbeddingAnswer, Encoding
from inlay.api.openai.embeddings.gathering import (
    Array,
    activated,
    embedding_card,
    normalized,
    vectors_of,
)
from inlay.api.openai.embeddings.prompts import in_prompts, inputs_of
from inlay.api.openai.schema.embeddings import (
    ClassificationData,
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    PoolingRequest,
)
from inlay.base.errors import InvalidRequestError
from inlay.http.parsed_request import read_request
from inlay.http.server import JSON_HEADER, Call
from inlay.messages.card import EmbeddingCard
from inlay.messages.request import Task
from inlay.router import ServedModel

_decoder = msgspec.json.Decoder(EmbeddingRequest)
_pooling_decoder = msgspec.json.Decoder(PoolingRequest)
_classification_decoder = msgspec.json.Decoder(ClassificationRequest)
_encode = msgspec.json.Encoder().encode

_TASKS = {Task.EMBED: "embed", Task.SCORE: "classify"}
"""vLLM's names of pooling tasks."""

_Plan: TypeAlias = tuple[Encoding, Callable[[Array, About], EmbeddingAnswer]]
"""Encoding of a response, and what makes it of the model's vectors, which is CPU work."""


async def embeddings(call: Call) -> None:
    """Answer with the embeddings of texts, ids, chats or tensor files."""
    await _answer(call, _decoder, "embd-", (Task.EMBED,), _embeddings)


async def pooling(call: Call) -> None:
    """Answer with each input's embedding, or with its class probabilities."""
    await _answer(call, _pooling_decoder, "pooling-", tuple(_TASKS), _pooled)


async def classify(call: Call) -> None:
    """Answer with each input's class probabilities and its likeliest class."""
    await _answer(call, _classification_decoder, "classify-", (Task.SCORE,), _classified)


async def _answer(
    call: Call,
    decoder: msgspec.json.Decoder[Any],
    prefix: str,
    tasks: tuple[Task, ...],
    plan: Callable[[Any, ServedModel, EmbeddingCard], _Plan],
) -> None:
    """Answer a request: options are checked by `plan`, before anything is computed."""
    incoming = await read_request(call, decoder, in_prompts)
    request = incoming.parsed.request
    check_common(call, request)
    id_ = answer_id(prefix, request.request_id)
    model = call.server.model(request.model, *tasks)
    card = embedding_card(model)
    encoding, make = plan(request, model, card)
    inputs = await inputs_of(call, incoming, model)
    encoding.check_count(len(inputs))
    size = max(incoming.size, 4 * len(inputs) * card.size)
    del incoming
    found, usage = await vectors_of(call, model, request, inputs, encoding.element_bytes)
    about = About(id_, int(time.time()), model.name, usage)
    answer = await call.server.run_prepared(size, make, found, about)
    await call.bytes(answer.body, answer.media, more=answer.headers)


def _embeddings(request: EmbeddingRequest, model: ServedModel, card: EmbeddingCard) -> _Plan:
    shown, encoding = Shown.of(request, card, model.name), Encoding.of(request)

    def make(vectors: Array, about: About) -> EmbeddingAnswer:
        vectors = vectors[:, : shown.dimensions]
        return encoding.answer(normalized(vectors) if shown.normalize else vectors, about)

    return encoding, make


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


def _pooled(request: PoolingRequest, model: ServedModel, card: EmbeddingCard) -> _Plan:
    classifies, asked = _pooling_task(request, model) == "classify", request.use_activation
    if not classifies:
        normalizes(card, asked, model.name, "use_activation")
    encoding = Encoding.of(request)

    def make(vectors: Array, about: About) -> EmbeddingAnswer:
        if classifies:
            vectors = activated(vectors, card.activation, asked)
        elif card.normalize if asked is None else asked:
            vectors = normalized(vectors)
        return encoding.answer(vectors, replace(about, kind="pooling"))

    return encoding, make


def _pooling_task(request: PoolingRequest, model: ServedModel) -> str:
    """Return the model's task. Raises `InvalidRequestError` if another one is requested."""
    served = [name for task, name in _TASKS.items() if task in model.card.tasks]
    if request.task is not None and request.task not in served:
        raise InvalidRequestError(
            f"task {request.task[:40]!r} is not served by the model `{model.name}`; it does "
            f"{' and '.join(served)}",
            param="task",
        )
    return request.task or served[0]


def _classified(request: ClassificationRequest, _: ServedModel, card: EmbeddingCard) -> _Plan:
    def make(vectors: Array, about: About) -> EmbeddingAnswer:
        probs = activated(vectors, card.activation, request.use_activation)
        response = ClassificationResponse(
            id=about.id,
            created=about.created,
            model=about.model,
            data=[_classes(index, row, card) for index, row in enumerate(probs)],
            usage=about.usage,
        )
        return EmbeddingAnswer(_encode(response), JSON_HEADER)

    return Encoding(), make


def _classes(index: int, probs: Array, card: EmbeddingCard) -> ClassificationData:
    best = int(probs.argmax())
    label = card.labels[best] if best < len(card.labels) else None
    return ClassificationData(
        index=index, label=label, probs=probs.tolist(), num_classes=len(probs)
    )
