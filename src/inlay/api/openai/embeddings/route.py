"""`POST /v1/embeddings`, and `/pooling` and `/classify` as in vLLM."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import msgspec

from inlay.api.fields import answer_id, check_common, own_names
from inlay.api.openai.embeddings.aliases import OTHER_VALUES, take_aliases
from inlay.api.openai.embeddings.chunking import LateChunking
from inlay.api.openai.embeddings.encoding import (
    About,
    EmbeddingAnswer,
    Encoding,
    Format,
    json_answer,
)
from inlay.api.openai.embeddings.file_answer import FILE_TYPE, file_answer
from inlay.api.openai.embeddings.gathering import (
    Array,
    Gathered,
    WantedOutputs,
    activated,
    bytes_of,
    embedding_card,
    first_output,
    gather,
    normalized,
    stacked,
)
from inlay.api.openai.embeddings.inputs import Inputs
from inlay.api.openai.embeddings.long_texts import LongTexts
from inlay.api.openai.embeddings.outputs import (
    MOST_NUMBERS,
    about_inputs,
    output_shown,
    rows_of,
)
from inlay.api.openai.embeddings.prompts import in_prompts, inputs_of, role_fields
from inlay.api.openai.embeddings.roles import DOCUMENT, part_of
from inlay.api.openai.embeddings.stored import DocumentFiles, check_storable, stored_answer
from inlay.api.openai.schema.embeddings import (
    ClassificationData,
    ClassificationRequest,
    ClassificationResponse,
    EmbeddingRequest,
    PoolingRequest,
    PromptsRequest,
)
from inlay.base.errors import InvalidRequestError
from inlay.http.parsed_request import ParsedRequest, read_request
from inlay.http.server import JSON_HEADER, OCTETS, Call
from inlay.messages.card import EmbeddingCard
from inlay.messages.pooling import CHUNKS
from inlay.messages.request import Task
from inlay.router import ServedModel
from inlay.store import NewVectors

_decoder = msgspec.json.Decoder(EmbeddingRequest)
_pooling_decoder = msgspec.json.Decoder(PoolingRequest)
_classification_decoder = msgspec.json.Decoder(ClassificationRequest)
_encode = msgspec.json.Encoder().encode

_ACCEPTED: Mapping[bytes, Format] = {FILE_TYPE: "safetensors", OCTETS.encode(): "bytes"}
"""Encodings of requests that name none, by what they accept."""

_TASKS = {
    "dense": "embed",
    "labels": "classify",
    "tokens": "token_embed",
    "token_labels": "token_classify",
}
"""vLLM's names of pooling tasks, by output."""


class EmbeddingsPlan(NamedTuple):
    """Plan of an answer.

    Attributes:
        encoding: of the response.
        wanted: of the model.
        make: makes the response of what the model gives, or files that are stored in its place.
            CPU work.
        role: of texts, where the request names none.
        prepare: makes other inputs of the request's. CPU work.
    """

    encoding: Encoding
    wanted: WantedOutputs
    make: Callable[[Sequence[Gathered], About], EmbeddingAnswer | list[NewVectors]]
    role: str | None = None
    prepare: Callable[[Inputs], Inputs] | None = None


async def embeddings(call: Call) -> None:
    """Answer with the embeddings of texts, ids, chats or tensor files."""
    most = call.server.settings.max_embedding_inputs
    plan = partial(_embeddings, _accepted(call), most)
    await _answer(call, _decoder, "embd-", (Task.EMBED,), plan)


async def pooling(call: Call) -> None:
    """Answer with each input's embedding or class probabilities, or those of its tokens."""
    tasks = (Task.EMBED, Task.SCORE)
    await _answer(call, _pooling_decoder, "pooling-", tasks, partial(_pooled, _accepted(call)))


async def classify(call: Call) -> None:
    """Answer with each input's class probabilities and its likeliest class."""
    await _answer(call, _classification_decoder, "classify-", (Task.SCORE,), _classified)


def _accepted(call: Call) -> Format | None:
    """Return the encoding that the header `Accept` stands for."""
    return _ACCEPTED.get(call.headers.get(b"accept", b"").strip().lower())


async def _answer(
    call: Call,
    decoder: msgspec.json.Decoder[Any],
    prefix: str,
    tasks: tuple[Task, ...],
    plan: Callable[[Any, ServedModel, EmbeddingCard], EmbeddingsPlan],
) -> None:
    """Answer a request: options are checked by `plan`, before anything is computed."""
    incoming = await read_request(call, decoder, in_prompts)
    request = incoming.parsed.request
    model = call.server.model(request.model, *tasks)
    names = take_aliases(request) if isinstance(request, EmbeddingRequest) else {}
    with own_names(names, OTHER_VALUES):
        await answer_inputs(call, incoming, request, prefix, model, partial(plan, request))


async def answer_inputs(
    call: Call,
    incoming: ParsedRequest[Any],
    asked: Any,
    prefix: str,
    model: ServedModel,
    plan: Callable[[ServedModel, EmbeddingCard], EmbeddingsPlan],
) -> None:
    """Answer with what a model gives for the inputs of a request.

    Args:
        call: the HTTP request.
        incoming: the request for embeddings, which may be translated from another API's.
        asked: the client's own, whose fields are checked.
        prefix: of the answer's id.
        model: that it asks.
        plan: makes the plan of the answer, before anything is computed.

    Raises:
        InlayError: the request is not valid, or failed.
    """
    request = incoming.parsed.request
    check_common(call, asked)
    id_ = answer_id(prefix, request.request_id)
    card = embedding_card(model)
    encoding, wanted, make, role, prepare = plan(model, card)
    ranges = bool({"tokens", "token_labels"} & {*wanted.names})
    inputs = await inputs_of(call, incoming, model, ranges=ranges, role=role)
    encoding.check_count(len(inputs))
    if prepare is not None:
        inputs = await call.server.run_prepared(incoming.size, prepare, inputs)
    size = incoming.size
    del incoming
    found, usage = await gather(call, model, request, inputs, wanted)
    about = About(id_, int(time.time()), model.name, usage)
    size = max(size, bytes_of(found, usage))
    made = await call.server.run_prepared(size, make, found, about)
    if isinstance(made, EmbeddingAnswer):
        answer = made
    else:
        answer = await stored_answer(call, made, found, about)
    await call.bytes(answer.body, answer.media, more=answer.headers)


def _embeddings(
    accepted: Format | None,
    most: int,
    request: EmbeddingRequest,
    model: ServedModel,
    card: EmbeddingCard,
) -> EmbeddingsPlan:
    request.encoding_format = request.encoding_format or accepted
    late, long = LateChunking.of(request), LongTexts.of(request, card, most)
    if request.store:
        return _stored(request, model, card)
    encoding = Encoding.of(request)
    if late is not None:
        encoding.check_json()
        form = VectorForm.of(request, card, model.name)
        card.output(CHUNKS, model.name, "input")
        answer = partial(late.answer, encoding=encoding, **form._asdict())
        bound = MOST_NUMBERS if encoding.format == "float" and late.size else None
        wanted = WantedOutputs((CHUNKS,), encoding.element_bytes, most=bound)
        return EmbeddingsPlan(encoding, wanted, answer, prepare=late.inputs)
    names = _names(request, model, encoding)
    shown = VectorForm.of(request, card, model.name) if "dense" in names else None
    role = _role(request, model, card)
    outputs = [card.output(name, model.name) for name in names if name != "dense"]
    floats = encoding.format == "float" and "tokens" in names
    kept = 0 if long is not None else request.max_active or 0
    wanted = WantedOutputs(names, encoding.element_bytes, kept, MOST_NUMBERS if floats else None)

    def make(found: Sequence[Gathered], about: About) -> EmbeddingAnswer:
        found = found if long is None else long.joined(found)
        items, vectors = about_inputs(found), None
        if long is not None:
            items = [{**item, **long.about(place)} for place, item in enumerate(items)]
        if shown is not None:
            vectors = stacked(found, "dense")[:, : shown.dimensions]
            vectors = normalized(vectors) if shown.normalize else vectors
        if encoding.format == "safetensors":
            return file_answer(
                found,
                vectors,
                outputs,
                encoding,
                about,
                card=card,
                role=role,
                normalize=request.normalize,
                weights_id=model.card.weights_id,
            )
        if vectors is not None and not outputs:
            return encoding.answer(vectors, about, items)
        made: list[dict[str, Any]] = [
            {} if vectors is None else encoding.vectors("embedding", vectors[place])
            for place in range(len(found))
        ]
        for item, each in zip(made, found, strict=True):
            for output in outputs:
                item[output.name] = output_shown(each, output, card, role, encoding, request)
            if not request.outputs and "tokens" in item:
                # A model of nothing else, as vLLM answers for it.
                item["embedding"] = item["tokens"].pop("data")
        return json_answer(made, about, items)

    return EmbeddingsPlan(encoding, wanted, make, prepare=None if long is None else long.inputs)


def _role(request: PromptsRequest, model: ServedModel, card: EmbeddingCard) -> str | None:
    """Return the role of a request's texts, where the model treats roles differently."""
    return part_of(role_fields(request), card, model.name).role if card.roles else None


def _stored(request: EmbeddingRequest, model: ServedModel, card: EmbeddingCard) -> EmbeddingsPlan:
    names = _names(request, model, Encoding())
    check_storable(request, names, card)
    role = part_of(role_fields(request), card, model.name, DOCUMENT).role or DOCUMENT
    files = DocumentFiles(request, names, model, card, role)
    return EmbeddingsPlan(Encoding(), files.wanted, files, role)


def _names(request: EmbeddingRequest, model: ServedModel, encoding: Encoding) -> tuple[str, ...]:
    """Return the outputs that a request wants.

    Raises `InvalidRequestError` for none, and for a field or a format that is of another.
    """
    if request.outputs == []:
        raise InvalidRequestError("outputs names nothing", param="outputs")
    names = tuple(dict.fromkeys(request.outputs or (first_output(model),)))
    for field, name in (("dimensions", "dense"), ("max_active", "sparse")):
        if getattr(request, field) is not None and name not in names:
            raise InvalidRequestError(
                f"{field} is of {name} vectors; the request gets {', '.join(names)}", param=field
            )
    encoding.check_vectors(names)
    if encoding.format == "safetensors":
        if "token_labels" in names:
            raise InvalidRequestError(
                "token_labels are classes with names, which a safetensors file does not hold; "
                "allowed: float, base64",
                param="encoding_format",
            )
    elif names != ("dense",):
        encoding.check_json()
    return names


class VectorForm(NamedTuple):
    """Post-processing of the model's vectors.

    Attributes:
        dimensions: number of first elements that are kept, or None for all.
        normalize: True if they get length 1.
    """

    dimensions: int | None
    normalize: bool

    @classmethod
    def of(cls, request: EmbeddingRequest, card: EmbeddingCard, model: str) -> "VectorForm":
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
        field = "use_activation" if request.normalize is None else "normalize"
        # A shortened vector is only meaningful with length 1.
        shortened = asked is not None
        normalize = normalizes(card, getattr(request, field), model, field, default=shortened)
        return cls(asked, normalize)


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


def _pooled(
    accepted: Format | None, request: PoolingRequest, model: ServedModel, card: EmbeddingCard
) -> EmbeddingsPlan:
    request.encoding_format = request.encoding_format or accepted
    name, asked = _pooling_output(request, model, card), request.use_activation
    if name == "dense":
        normalizes(card, asked, model.name, "use_activation")
    encoding = Encoding.of(request)
    encoding.check_vectors((name,))
    role = _role(request, model, card)
    in_file = encoding.format == "safetensors"
    if in_file and name not in ("dense", "tokens"):
        raise InvalidRequestError(
            f"a safetensors file holds vectors, and {_TASKS[name]} gives classes; allowed: float, "
            "base64",
            param="encoding_format",
        )
    if name in ("tokens", "token_labels") and not in_file:
        encoding.check_json()
    floats = encoding.format == "float" and name == "tokens"
    wanted = WantedOutputs((name,), encoding.element_bytes, most=MOST_NUMBERS if floats else None)

    def make(found: Sequence[Gathered], about: About) -> EmbeddingAnswer:
        items, about = about_inputs(found), replace(about, kind="pooling")
        if in_file:
            dense = stacked(found, name) if name == "dense" else None
            if dense is not None and (card.normalize if asked is None else asked):
                dense = normalized(dense)
            return file_answer(
                found,
                dense,
                [] if name == "dense" else [card.output(name, model.name)],
                encoding,
                about,
                card=card,
                role=role,
                normalize=asked,
                weights_id=model.card.weights_id,
            )
        if name in ("tokens", "token_labels"):
            output, shown = card.output(name, model.name), []
            for each in found:
                classes = name == "token_labels"
                values = rows_of(each, output, card, role, False if classes else asked).values
                values = activated(values, "softmax", asked) if classes else values
                shown.append(encoding.vectors("data", values))
            return json_answer(shown, about, items)
        vectors = stacked(found, name)
        if name == "labels":
            vectors = activated(vectors, card.activation, asked)
        elif card.normalize if asked is None else asked:
            vectors = normalized(vectors)
        return encoding.answer(vectors, about, items)

    return EmbeddingsPlan(encoding, wanted, make)


def _pooling_output(request: PoolingRequest, model: ServedModel, card: EmbeddingCard) -> str:
    """Return the output of the request's task, or the model's first.

    Raises `InvalidRequestError` if the model does not do the task.
    """
    names = [each.name for each in card.outputs] or [first_output(model)]
    served = {_TASKS[name]: name for name in names if name in _TASKS}
    if not served or (request.task is not None and request.task not in served):
        does = " and ".join(served) or "none of vLLM's: ask /v1/embeddings"
        task = "pooling" if request.task is None else f"task {request.task[:40]!r}"
        raise InvalidRequestError(
            f"{task} is not served by the model `{model.name}`; it does {does}", param="task"
        )
    return served[request.task] if request.task is not None else next(iter(served.values()))


def _classified(
    request: ClassificationRequest, model: ServedModel, card: EmbeddingCard
) -> EmbeddingsPlan:
    def make(found: Sequence[Gathered], about: About) -> EmbeddingAnswer:
        probs = activated(stacked(found, "labels"), card.activation, request.use_activation)
        response = ClassificationResponse(
            id=about.id,
            created=about.created,
            model=about.model,
            data=[_classes(index, row, card) for index, row in enumerate(probs)],
            usage=about.usage,
        )
        return EmbeddingAnswer(_encode(response), JSON_HEADER)

    encoding = Encoding()
    return EmbeddingsPlan(encoding, WantedOutputs(("labels",), encoding.element_bytes), make)


def _classes(index: int, probs: Array, card: EmbeddingCard) -> ClassificationData:
    best = int(probs.argmax())
    label = card.labels[best] if best < len(card.labels) else None
    return ClassificationData(
        index=index, label=label, probs=probs.tolist(), num_classes=len(probs)
    )
