"""Routes of text-embeddings-inference: translated to requests for vectors, and run so."""

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import msgspec

import inlay
from inlay.api.fields import answer_id, check_common, own_names
from inlay.api.openai.embeddings.encoding import About, EmbeddingAnswer, Encoding
from inlay.api.openai.embeddings.gathering import (
    Gathered,
    WantedOutputs,
    activated,
    check_count,
    embedding_card,
    gather,
    normalized,
    stacked,
)
from inlay.api.openai.embeddings.inputs import Inputs, Joined, PairInputs, TextInputs
from inlay.api.openai.embeddings.outputs import MOST_NUMBERS, comparable
from inlay.api.openai.embeddings.prompts import cut_of, role_fields
from inlay.api.openai.embeddings.roles import part_of
from inlay.api.openai.embeddings.route import EmbeddingsPlan, VectorForm, answer_inputs
from inlay.api.openai.embeddings.scoring import counted, in_rerank, rerank_documents, scored
from inlay.api.openai.schema.embeddings import ClassificationRequest, EmbeddingRequest
from inlay.api.openai.schema.scoring import ScoreRequest
from inlay.api.openai.schema.tei import (
    EmbedInputsRequest,
    Failure,
    InputsOfTei,
    Prediction,
    PredictRequest,
    RankedText,
    RankRequest,
    ServedInfo,
    SimilarityOptions,
    SimilarityRequest,
    SparseValue,
)
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError
from inlay.http.bodies.base64_extractor import Parsed
from inlay.http.errors import ErrorForm, shown
from inlay.http.parsed_request import ParsedRequest, read_request
from inlay.http.server import JSON_HEADER, Call
from inlay.messages.card import EmbeddingCard
from inlay.messages.request import Task
from inlay.render import Renderer
from inlay.router import ServedModel

_inputs_decoder = msgspec.json.Decoder(EmbedInputsRequest)
_predict_decoder = msgspec.json.Decoder(PredictRequest)
_rank_decoder = msgspec.json.Decoder(RankRequest)
_encode = msgspec.json.Encoder().encode

_similarity_decoder = msgspec.json.Decoder(SimilarityRequest)

_FIELDS = {
    "input": "inputs",
    "text_1": "inputs.source_sentence",
    "text_2": "inputs.sentences",
    "auto_truncate": "truncate",
    "truncation_side": "truncation_direction",
    "use_activation": "raw_scores",
}
"""Fields of our requests, and those of this API that they come from."""

_POOLING = {"lasttoken": "last_token"}
"""Its names of pooling, where they are not sentence-transformers'."""

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
    await _answer(call, _dense)


async def embed_all(call: Call) -> None:
    """Answer with the vectors of each text's tokens."""
    await _answer(call, partial(_others, "tokens", _tokens))


async def embed_sparse(call: Call) -> None:
    """Answer with the sparse vector of each text, as pairs."""
    await _answer(call, partial(_others, "sparse", _pairs))


async def first(call: Call) -> None:
    """Answer at `/`: with vectors or classes, whichever the first of these models gives."""
    gives_vectors = Task.EMBED in call.server.model(None, Task.EMBED, Task.SCORE).card.tasks
    # Requests for the page at the same path are not counted with these.
    call.route, answer = ("/embed", embed) if gives_vectors else ("/predict", predict)
    await answer(call)


async def similarity(call: Call) -> None:
    """Answer with the likeness of a text with each of some others."""
    incoming = await read_request(call, _similarity_decoder, lambda _: ())
    asked = incoming.parsed.request
    options = asked.parameters or SimilarityOptions()
    request = ScoreRequest(
        model=asked.model,
        auto_truncate=options.truncate,
        truncation_side=_side(options.truncation_direction),
        query_prompt_name=options.prompt_name,
        document_prompt_name=options.prompt_name,
        cache_salt=asked.cache_salt,
        priority=asked.priority,
    )
    with own_names(_FIELDS):
        scores, _, _ = await scored(
            call,
            ParsedRequest(Parsed(request, {}), incoming.size, ()),
            counted(call, asked.inputs.source_sentence, "text_1"),
            counted(call, asked.inputs.sentences, "text_2"),
        )
    await call.bytes(_encode(scores), JSON_HEADER)


async def predict(call: Call) -> None:
    """Answer with the classes of each text, or pair of texts, the likeliest first."""
    incoming = await read_request(call, _predict_decoder, lambda _: ())
    asked = incoming.parsed.request
    model = call.server.model(asked.model, Task.SCORE)
    check_common(call, asked)
    answer_id("", asked.request_id)
    given = _Sequences.of(call, asked.inputs)
    card, request = embedding_card(model), ClassificationRequest(**_common(asked))
    renderer = await call.server.renderers.of(model.card)
    with own_names(_FIELDS):
        inputs = await call.server.run_prepared(
            incoming.size, given.inputs, call, request, model, renderer
        )
        wanted = WantedOutputs(("labels",), _NUMBER_BYTES)
        found, _ = await gather(call, model, request, inputs, wanted)
    size = 4 * len(found) * card.size
    body = await call.server.run_prepared(size, _predicted, asked, given, found, card)
    await call.bytes(body, JSON_HEADER)


async def rank(call: Call) -> None:
    """Answer `/rerank`: with `texts` as a list, else as `/v1/rerank` does."""
    incoming = await read_request(call, _rank_decoder, in_rerank)
    request = incoming.parsed.request
    if request.texts is None:
        if request.documents is None:
            raise InvalidRequestError("give documents, or texts", param="documents")
        _check_form(request, "documents")
        await rerank_documents(call, incoming)
        return
    call.answers_with(TEI)
    if request.documents is not None:
        raise InvalidRequestError("give either documents or texts, not both", param="texts")
    _check_form(request, "texts")
    request.auto_truncate = request.truncate
    request.truncation_side = _side(request.truncation_direction)
    request.use_activation = not request.raw_scores
    sides = counted(call, request.query, "query"), counted(call, request.texts, "texts")
    with own_names(_FIELDS):
        scores, _, _ = await scored(call, incoming, *sides)
    texts = request.texts if request.return_text else None

    def ranked() -> bytes:
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        return _encode(
            [RankedText(n, scores[n], None if texts is None else texts[n]) for n in best]
        )

    await call.bytes(await call.server.run_prepared(incoming.size, ranked), JSON_HEADER)


_FORMS: Mapping[str, Mapping[str, tuple[object, ...]]] = {
    "documents": {
        "top_n": (None, 0),
        "return_documents": (None, False),
        "auto_truncate": (None,),
        "truncation_side": (None,),
        "use_activation": (None,),
        "top_k": (None, 0, msgspec.UNSET),
        "truncation": (None, msgspec.UNSET),
    },
    "texts": {
        "truncate": (None,),
        "truncation_direction": (None,),
        "raw_scores": (False,),
        "return_text": (False,),
    },
}
"""Fields that one form of a rerank has alone, and their values that say nothing in the other."""


def _check_form(request: RankRequest, form: str) -> None:
    """Raise `InvalidRequestError` for a field of the other form."""
    (other,) = _FORMS.keys() - {form}
    for name, silent in _FORMS[other].items():
        if getattr(request, name) not in silent:
            raise InvalidRequestError(
                f"{name} is of a rerank with {other}, and this one has {form}, which takes "
                f"{', '.join(_FORMS[form])}",
                param=name,
            )


async def describe(call: Call) -> None:
    """Answer with the first model that gives vectors or scores."""
    for card in call.server.router.models():
        if card.embedding is None or card.is_inner:
            continue
        settings = call.server.settings
        await call.json(
            ServedInfo(
                model_id=card.name,
                model_dtype=card.dtype,
                model_type=_kind(card.embedding, gives_vectors=Task.EMBED in card.tasks),
                max_input_length=card.limits.max_model_len,
                max_client_batch_size=settings.max_embedding_inputs,
                auto_truncate=settings.truncate_prompt_tokens is not None,
                version=inlay.__version__,
            )
        )
        return
    raise NotFoundError("no model of this server gives vectors or scores")


def _kind(card: EmbeddingCard, *, gives_vectors: bool) -> dict[str, Any]:
    if not gives_vectors:
        names = dict(enumerate(card.labels)) or {index: str(index) for index in range(card.size)}
        labels = {
            "id2label": {str(index): name for index, name in names.items()},
            "label2id": {name: index for index, name in names.items()},
        }
        return {"reranker" if card.size == 1 else "classifier": labels}
    first = next(iter(card.outputs), None)
    if first is not None and first.name == "sparse":
        return {"embedding": {"pooling": "splade"}}
    modes = () if first is None else first.pooling
    return {"embedding": {"pooling": "+".join(_POOLING.get(mode, mode) for mode in modes)}}


async def _answer(
    call: Call,
    plan: Callable[[Any, Any, ServedModel, EmbeddingCard], EmbeddingsPlan],
) -> None:
    incoming = await read_request(call, _inputs_decoder, lambda _: ())
    asked = incoming.parsed.request
    model = call.server.model(asked.model, Task.EMBED)
    texts: Any = asked.inputs
    request = EmbeddingRequest(
        input=texts, dimensions=asked.dimensions, normalize=asked.normalize, **_common(asked)
    )
    with own_names(_FIELDS):
        await answer_inputs(
            call,
            ParsedRequest(Parsed(request, {}), incoming.size, ()),
            asked,
            "embed-",
            model,
            partial(plan, asked, request),
        )


def _side(direction: str | None) -> Any:
    return None if direction is None else direction.lower()


def _common(asked: InputsOfTei) -> dict[str, Any]:
    return {
        "model": asked.model,
        "prompt_name": asked.prompt_name,
        "auto_truncate": asked.truncate,
        "truncation_side": _side(asked.truncation_direction),
        "cache_salt": asked.cache_salt,
        "priority": asked.priority,
        "request_id": asked.request_id,
    }


class _Sequences(NamedTuple):
    """Texts and pairs that `/predict` classifies.

    Attributes:
        each: lists of one text, or of the two of a pair.
        single: True of one that is no batch.
    """

    each: Sequence[Sequence[str]]
    single: bool

    @classmethod
    def of(cls, call: Call, given: str | list[str | list[str]]) -> "_Sequences":
        """Return what `inputs` holds. Raises `InvalidRequestError` for what is neither."""
        if not given:
            raise InvalidRequestError("inputs must not be empty", param="inputs")
        single = isinstance(given, str) or isinstance(given[0], str)
        each: Any = given
        if single:
            each = [[given]] if isinstance(given, str) else [given]
        found = cls(each, single)
        check_count(call, len(each), "inputs")
        for place, texts in enumerate(each):
            path = found.path(place)
            if isinstance(texts, str) or len(texts) not in (1, 2):
                got = "a text among lists" if isinstance(texts, str) else f"{len(texts)} texts"
                raise InvalidRequestError(
                    f"{path} has {got}; a list holds one text, or a pair of two, and a batch is a "
                    "list of such lists",
                    param=path,
                )
            if not all(isinstance(text, str) for text in texts):
                raise InvalidRequestError(
                    f"{path} is a text and a list; a batch is of lists alone", param=path
                )
            if "" in texts:
                raise InvalidRequestError(
                    f"{path} holds an empty string, which has no classes", param=path
                )
        return found

    def path(self, place: int) -> str:
        """Return the path in the request."""
        return "inputs" if self.single else f"inputs[{place}]"

    @property
    def order(self) -> list[int]:
        """Places in the order of `inputs`: texts, then pairs."""
        return sorted(range(len(self.each)), key=lambda place: len(self.each[place]))

    def inputs(
        self,
        call: Call,
        request: ClassificationRequest,
        model: ServedModel,
        renderer: Renderer,
    ) -> Inputs:
        """Return all as inputs of a model. CPU work.

        Raises `InvalidRequestError` for pairs that it does not read.
        """
        card, cut = embedding_card(model), cut_of(call, request, model.max_len)
        part = part_of(role_fields(request), card, model.name)
        params = [self.path(place) for place in self.order]
        texts = [each[0] for each in self.each if len(each) == 1]
        pairs = [(each[0], each[1]) for each in self.each if len(each) == 2]
        if pairs and card.templated:
            raise InvalidRequestError(
                f"{params[-1]} is a pair; the model `{model.name}` reads pairs in a template: ask "
                "/rerank or /v1/score",
                param=params[-1],
            )
        return Joined(
            [
                TextInputs(
                    texts,
                    renderer,
                    cut,
                    prefixes=(part.prefix,),
                    lower_case=card.lower_case,
                    params=tuple(params[: len(texts)]),
                ),
                PairInputs(pairs, renderer, cut, "inputs", params=tuple(params[len(texts) :])),
            ]
        )


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
    asked: PredictRequest, given: _Sequences, found: Sequence[Gathered], card: EmbeddingCard
) -> bytes:
    probs = activated(stacked(found, "labels"), card.activation, not asked.raw_scores)
    each: list[list[Prediction]] = [[]] * len(probs)
    for place, row in zip(given.order, probs, strict=True):
        each[place] = [
            Prediction(
                float(row[index]), card.labels[index] if index < len(card.labels) else str(index)
            )
            for index in (-row).argsort(kind="stable")
        ]
    return _encode(each[0] if given.single else each)
