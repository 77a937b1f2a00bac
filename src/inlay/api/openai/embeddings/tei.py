"""Routes of text-embeddings-inference: translated to requests for vectors, and run so."""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import msgspec

import inlay
from inlay.api.openai.embeddings.encoding import About, EmbeddingAnswer, Encoding
from inlay.api.openai.embeddings.gathering import (
    Gathered,
    WantedOutputs,
    activated,
    normalized,
    stacked,
)
from inlay.api.openai.embeddings.outputs import MOST_NUMBERS, comparable
from inlay.api.openai.embeddings.route import EmbeddingsPlan, VectorForm, answer_inputs
from inlay.api.openai.embeddings.scoring import counted, in_rerank, rerank_documents, scored
from inlay.api.openai.schema.embeddings import ClassificationRequest, EmbeddingRequest
from inlay.api.openai.schema.tei import (
    EmbedInputsRequest,
    Failure,
    InputsOfTei,
    Prediction,
    PredictRequest,
    RankedText,
    RankRequest,
    ServedInfo,
    SparseValue,
)
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError, Path
from inlay.http.bodies.base64_extractor import Parsed
from inlay.http.errors import ErrorForm, shown
from inlay.http.parsed_request import ParsedRequest, read_request
from inlay.http.server import JSON_HEADER, Call
from inlay.messages.card import EmbeddingCard
from inlay.messages.request import Task
from inlay.router import ServedModel

_inputs_decoder = msgspec.json.Decoder(EmbedInputsRequest)
_predict_decoder = msgspec.json.Decoder(PredictRequest)
_rank_decoder = msgspec.json.Decoder(RankRequest)
_encode = msgspec.json.Encoder().encode

_FIELDS = {
    "input": "inputs",
    "auto_truncate": "truncate",
    "truncate_prompt_tokens": "truncate",
    "truncation_side": "truncation_direction",
}
"""Fields of our requests, and those of this API that they come from."""

_NUMBER_BYTES = 14
"""Approximate bytes of a number in JSON."""


def _failure(error: InlayError, _: str) -> Failure:
    kinds = {429: "Overloaded", 503: "Unhealthy"}
    kind: Any = kinds.get(error.status, "Validation" if error.status < 500 else "Backend")
    return Failure(shown(error).message, kind)


TEI = ErrorForm(Failure, _failure)
"""Its form of errors: `{"error": ..., "error_type": ...}`."""


async def embed(call: Call) -> None:
    """Answer with the dense vector of each text: a list of lists."""
    await _answer(call, _inputs_decoder, (Task.EMBED,), _dense)


async def embed_all(call: Call) -> None:
    """Answer with the vectors of each text's tokens."""
    await _answer(call, _inputs_decoder, (Task.EMBED,), partial(_others, "tokens", _tokens))


async def embed_sparse(call: Call) -> None:
    """Answer with the sparse vector of each text, as pairs."""
    await _answer(call, _inputs_decoder, (Task.EMBED,), partial(_others, "sparse", _pairs))


async def predict(call: Call) -> None:
    """Answer with the classes of each text, the likeliest first."""
    await _answer(call, _predict_decoder, (Task.SCORE,), _predicted)


async def rank(call: Call) -> None:
    """Answer `/rerank`: with `texts` as a list, else as `/v1/rerank` does."""
    incoming = await read_request(call, _rank_decoder, in_rerank)
    request = incoming.parsed.request
    if request.texts is None:
        if request.documents is None:
            raise InvalidRequestError("give documents, or texts", param="documents")
        await rerank_documents(call, incoming)
        return
    call.answers_with(TEI)
    if request.documents is not None:
        raise InvalidRequestError("give either documents or texts, not both", param="texts")
    request.auto_truncate = request.truncate
    request.truncation_side = _side(request.truncation_direction)
    request.use_activation = not request.raw_scores
    sides = counted(call, request.query, "query"), counted(call, request.texts, "texts")
    scores, _, _ = await scored(call, incoming, *sides)
    best = sorted(range(len(scores)), key=lambda index: -scores[index])
    texts = request.texts if request.return_text else None
    ranked = [RankedText(n, scores[n], None if texts is None else texts[n]) for n in best]
    await call.bytes(_encode(ranked), JSON_HEADER)


async def describe(call: Call) -> None:
    """Answer with the first model that gives vectors or scores."""
    for card in call.server.router.models():
        if card.embedding is None:
            continue
        settings = call.server.settings
        kind = "embedding" if Task.EMBED in card.tasks else "classifier"
        if kind == "classifier" and card.embedding.size == 1:
            kind = "reranker"
        await call.json(
            ServedInfo(
                model_id=card.name,
                model_dtype=card.dtype,
                model_type={kind: {}},
                max_input_length=card.limits.max_model_len,
                max_client_batch_size=settings.max_embedding_inputs,
                auto_truncate=settings.truncate_prompt_tokens is not None,
                version=inlay.__version__,
            )
        )
        return
    raise NotFoundError("no model of this server gives vectors or scores")


async def _answer(
    call: Call,
    decoder: msgspec.json.Decoder[Any],
    tasks: tuple[Task, ...],
    plan: Callable[[Any, Any, ServedModel, EmbeddingCard], EmbeddingsPlan],
) -> None:
    incoming = await read_request(call, decoder, lambda _: ())
    asked = incoming.parsed.request
    model = call.server.model(asked.model, *tasks)
    request = _translated(asked)
    try:
        await answer_inputs(
            call,
            ParsedRequest(Parsed(request, {}), incoming.size, ()),
            asked,
            "embed-",
            model,
            partial(plan, asked, request),
        )
    except InvalidRequestError as error:
        raise error.mapped(_own_field) from None


def _own_field(path: Path) -> Path:
    match path:
        case (str(field), *rest):
            return (_FIELDS.get(field, field), *rest)
    return path


def _side(direction: str | None) -> Any:
    return None if direction is None else direction.lower()


def _texts(inputs: str | list[str | list[str]]) -> list[str]:
    """Return texts; one in a list of its own is one of a batch, as `/predict` takes them."""
    given = [inputs] if isinstance(inputs, str) else inputs
    found = []
    for place, each in enumerate(given):
        if not isinstance(each, str) and len(each) != 1:
            raise InvalidRequestError(
                f"inputs[{place}] has {len(each)} texts; one is allowed: pairs are those of "
                "/rerank",
                param=f"inputs[{place}]",
            )
        found.append(each if isinstance(each, str) else each[0])
    return found


def _translated(asked: InputsOfTei) -> Any:
    common: dict[str, Any] = {
        "model": asked.model,
        "input": _texts(asked.inputs),
        "prompt_name": asked.prompt_name,
        "auto_truncate": asked.truncate,
        "truncation_side": _side(asked.truncation_direction),
        "cache_salt": asked.cache_salt,
        "priority": asked.priority,
        "request_id": asked.request_id,
    }
    if isinstance(asked, EmbedInputsRequest):
        return EmbeddingRequest(dimensions=asked.dimensions, normalize=asked.normalize, **common)
    return ClassificationRequest(**common)


def _dense(
    asked: EmbedInputsRequest, request: EmbeddingRequest, model: ServedModel, card: EmbeddingCard
) -> EmbeddingsPlan:
    form = VectorForm.of(request, card, model.name)

    def make(found: Sequence[Gathered], _: About) -> EmbeddingAnswer:
        vectors = stacked(found, "dense")[:, : form.dimensions]
        vectors = normalized(vectors) if form.normalize else vectors
        return EmbeddingAnswer(_encode([Encoding().shown(row) for row in vectors]), JSON_HEADER)

    return EmbeddingsPlan(Encoding(), WantedOutputs(("dense",), _NUMBER_BYTES), make)


def _others(
    name: str,
    show: Callable[[Gathered, EmbeddingCard], object],
    asked: EmbedInputsRequest,
    request: EmbeddingRequest,
    model: ServedModel,
    card: EmbeddingCard,
) -> EmbeddingsPlan:
    card.output(name, model.name, "inputs")

    def make(found: Sequence[Gathered], _: About) -> EmbeddingAnswer:
        return EmbeddingAnswer(_encode([show(each, card) for each in found]), JSON_HEADER)

    return EmbeddingsPlan(
        Encoding(), WantedOutputs((name,), _NUMBER_BYTES, most=MOST_NUMBERS), make
    )


def _tokens(found: Gathered, card: EmbeddingCard) -> object:
    return Encoding().shown(comparable(found, ("tokens",), card, None)["tokens"])


def _pairs(found: Gathered, _: EmbeddingCard) -> object:
    parts = (found.bundle[f"sparse.{part}"].tolist() for part in ("indices", "values"))
    return [SparseValue(*pair) for pair in zip(*parts, strict=True)]


def _predicted(
    asked: PredictRequest, request: ClassificationRequest, model: ServedModel, card: EmbeddingCard
) -> EmbeddingsPlan:
    single = isinstance(asked.inputs, str)

    def make(found: Sequence[Gathered], _: About) -> EmbeddingAnswer:
        probs = activated(stacked(found, "labels"), card.activation, not asked.raw_scores)
        each = [
            [
                Prediction(
                    float(row[place]),
                    card.labels[place] if place < len(card.labels) else str(place),
                )
                for place in (-row).argsort(kind="stable")
            ]
            for row in probs
        ]
        return EmbeddingAnswer(_encode(each[0] if single else each), JSON_HEADER)

    return EmbeddingsPlan(Encoding(), WantedOutputs(("labels",), _NUMBER_BYTES), make)
