"""`POST /v1/score` and `POST /v1/rerank`: cross-encoders by their own scores, embedding models by cosine."""

import time
import uuid
from collections.abc import Callable, Sequence

import msgspec
import numpy as np

from inlay.errors import InvalidRequestError
from inlay.frontend.answer_id import answer_id
from inlay.frontend.incoming import read_json
from inlay.frontend.server import Call
from inlay.frontend.vectors.embeddings import cut_of
from inlay.frontend.vectors.gathering import (
    Array,
    Gathering,
    check_count,
    check_texts_request,
    embedding_card,
    normalized,
)
from inlay.frontend.vectors.inputs import Pairs, Texts
from inlay.protocol.embedding import EmbeddingCard
from inlay.protocol.openai.embeddings import (
    Document,
    RerankRequest,
    RerankResponse,
    RerankResult,
    ScoreData,
    ScoreRequest,
    ScoreResponse,
    TextsRequest,
    TextsUsage,
)
from inlay.protocol.work import Task
from inlay.router import ServedModel

_score_decoder = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)

_FIRST = ("text_1", "queries", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")

_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda logits: logits,
    "tanh": np.tanh,
    # Written so that no exponential overflows.
    "sigmoid": lambda logits: 0.5 * (1 + np.tanh(0.5 * logits)),
}


async def score(call: Call) -> None:
    """Answer with the scores of pairs."""
    request = await read_json(call, _score_decoder)
    check_texts_request(call, request)
    model = call.server.model(request.model)
    first, first_name = _side(request, _FIRST)
    second, second_name = _side(request, _SECOND)
    check_count(call, len(second), second_name)
    if len(first) not in (1, len(second)):
        raise InvalidRequestError(
            f"{first_name} has {len(first)} texts and {second_name} {len(second)}; give one, or as many as there are on the other "
            "side",
            param=first_name,
        )
    id_ = answer_id("score-", request.request_id)
    scores, usage = await _scores(call, model, request, first, second, (first_name, second_name))
    data = [ScoreData(index=index, score=each) for index, each in enumerate(scores)]
    await call.json(ScoreResponse(id=id_, created=int(time.time()), model=model.name, data=data, usage=usage))


async def rerank(call: Call) -> None:
    """Answer with documents in the order of how well they fit a query."""
    request = await read_json(call, _rerank_decoder)
    check_texts_request(call, request)
    model = call.server.model(request.model)
    documents = [each if isinstance(each, str) else each.text for each in request.documents]
    if request.top_n is not None and request.top_n < 0:
        raise InvalidRequestError(f"top_n must be 0 or more, got {request.top_n}", param="top_n")
    _check_texts([request.query], "query")
    _check_texts(documents, "documents")
    check_count(call, len(documents), "documents")
    id_ = answer_id("rerank-", request.request_id)
    scores, usage = await _scores(call, model, request, [request.query], documents, ("query", "documents"))
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    shows = request.return_documents is not False
    results = [
        RerankResult(
            index=index,
            document=Document(documents[index]) if shows else msgspec.UNSET,
            relevance_score=scores[index],
        )
        for index in best
    ]
    await call.json(RerankResponse(id=id_, model=model.name, usage=usage, results=results))


def _side(request: ScoreRequest, names: Sequence[str]) -> tuple[list[str], str]:
    """The texts of one side of a score request, and the name they were given under."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give exactly one of {', '.join(names)}, got {' and '.join(given) or 'none'}", param=names[0]
        )
    texts: str | list[str] = getattr(request, given[0])
    texts = [texts] if isinstance(texts, str) else texts
    _check_texts(texts, given[0])
    return texts, given[0]


def _check_texts(texts: Sequence[str], param: str) -> None:
    if not texts:
        raise InvalidRequestError(f"{param} must not be empty", param=param)
    if "" in texts:
        raise InvalidRequestError(f"{param} holds an empty string, which has no score", param=param)


async def _scores(
    call: Call,
    model: ServedModel,
    request: TextsRequest,
    first: list[str],
    second: list[str],
    params: tuple[str, str],
) -> tuple[list[float], TextsUsage]:
    """The score of each of `second` with its partner in `first`, which may be one for all."""
    server = call.server
    card = embedding_card(model, Task.SCORE, Task.EMBED)
    scores_pairs = Task.SCORE in model.card.tasks
    if scores_pairs and card.size != 1:
        raise InvalidRequestError(
            f"the model `{model.name}` has {card.size} labels for a pair, and a score is one number",
            param="model",
        )
    renderer = await server.renderers.of(model.card)
    cut = cut_of(request, model.max_len)
    gathering = Gathering(call, model, request, f"score-{uuid.uuid4().hex}")
    if scores_pairs:
        partners = first * len(second) if len(first) == 1 else first
        pairs = Pairs(list(zip(partners, second, strict=True)), renderer, cut, params[1])
        logits = await gathering.vectors(pairs, card.size)
        found = _of_logits(logits, card, request)
    else:
        names = tuple(f"{params[0]}[{n}]" for n in range(len(first))) + tuple(
            f"{params[1]}[{n}]" for n in range(len(second))
        )
        texts = Texts([*first, *second], renderer, cut, lower_case=card.lower_case, params=names)
        vectors = normalized(await gathering.vectors(texts, card.size))
        found = np.einsum(
            "ij,ij->i",
            np.broadcast_to(vectors[: len(first)], (len(second), card.size)),
            vectors[len(first) :],
        )
    server.metrics.embedded(model.card.name, len(second), gathering.positions, call.began)
    scores: list[float] = found.tolist()
    return scores, TextsUsage(gathering.positions, gathering.positions)


def _of_logits(logits: Array, card: EmbeddingCard, request: TextsRequest) -> Array:
    if request.use_activation is False:
        return logits[:, 0]
    return _ACTIVATIONS[card.activation](logits[:, 0])


__all__ = ["rerank", "score"]
