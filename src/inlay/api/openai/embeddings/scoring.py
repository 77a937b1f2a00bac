"""`POST /v1/score` and `POST /v1/rerank`.

Cross-encoders by their own scores, embedding models by the likeness of one of their outputs.
"""

import time
from collections.abc import Sequence

import msgspec

from inlay.api.fields import answer_id, check_common
from inlay.api.openai.embeddings.gathering import (
    Wanted,
    activated,
    check_count,
    embedding_card,
    first_output,
    gather,
    stacked,
)
from inlay.api.openai.embeddings.inputs import Joined, PairInputs, TextInputs
from inlay.api.openai.embeddings.prompts import cut_of
from inlay.api.openai.embeddings.roles import DOCUMENT, QUERY, part_of
from inlay.api.openai.embeddings.similarity import similarities
from inlay.api.openai.schema.embeddings import (
    RankedDocument,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    ScoreData,
    ScoreRequest,
    ScoreResponse,
    ScoringRequest,
    TextsUsage,
)
from inlay.base.errors import InvalidRequestError
from inlay.http.parsed_request import read_json
from inlay.http.server import Call
from inlay.messages.request import Task
from inlay.router import ServedModel

_score_decoder = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)

_FIRST = ("text_1", "queries", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")


async def score(call: Call) -> None:
    """Answer with the similarity scores of pairs."""
    request = await read_json(call, _score_decoder)
    check_common(call, request)
    id_ = answer_id("score-", request.request_id)
    model = call.server.model(request.model, Task.SCORE, Task.EMBED)
    first, first_name = _side(request, _FIRST)
    second, second_name = _side(request, _SECOND)
    check_count(call, len(second), second_name)
    if len(first) not in (1, len(second)):
        raise InvalidRequestError(
            f"{first_name} has {len(first)} texts and {second_name} {len(second)}; give one, or "
            "as many as there are on the other side",
            param=first_name,
        )
    scores, usage = await _scores(call, model, request, first, second, (first_name, second_name))
    data = [ScoreData(index=index, score=each) for index, each in enumerate(scores)]
    await call.json(
        ScoreResponse(id=id_, created=int(time.time()), model=model.name, data=data, usage=usage)
    )


async def rerank(call: Call) -> None:
    """Answer with documents ranked by relevance to a query."""
    request = await read_json(call, _rerank_decoder)
    check_common(call, request)
    id_ = answer_id("score-", request.request_id)
    model = call.server.model(request.model, Task.SCORE, Task.EMBED)
    given = [request.documents] if isinstance(request.documents, str) else request.documents
    documents = [each if isinstance(each, str) else each.text for each in given]
    if request.top_n is not None and request.top_n < 0:
        raise InvalidRequestError(f"top_n must be 0 or more, got {request.top_n}", param="top_n")
    _check_texts([request.query], "query")
    _check_texts(documents, "documents")
    check_count(call, len(documents), "documents")
    scores, used = await _scores(
        call, model, request, [request.query], documents, ("query", "documents")
    )
    best = sorted(range(len(scores)), key=lambda index: -scores[index])[: request.top_n or None]
    shows = request.return_documents is not False
    results = [
        RerankResult(
            index=index,
            document=RankedDocument(documents[index]) if shows else msgspec.UNSET,
            relevance_score=scores[index],
        )
        for index in best
    ]
    usage = RerankUsage(used.prompt_tokens, used.total_tokens)
    await call.json(RerankResponse(id=id_, model=model.name, usage=usage, results=results))


def _side(request: ScoreRequest, names: Sequence[str]) -> tuple[list[str], str]:
    """Return the texts of one side of a score request, and the field they came in."""
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give exactly one of {', '.join(names)}, got {' and '.join(given) or 'none'}",
            param=names[0],
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
    request: ScoringRequest,
    first: list[str],
    second: list[str],
    params: tuple[str, str],
) -> tuple[list[float], TextsUsage]:
    """Return the score of each text in `second` with its partner in `first`; one may serve all.

    Raises `InvalidRequestError` for texts, and fields, that the model does not take.
    """
    server = call.server
    card = embedding_card(model)
    scores_pairs = Task.SCORE in model.card.tasks
    if scores_pairs and card.size != 1:
        raise InvalidRequestError(
            f"the model `{model.name}` has {card.size} labels for a pair, and a score is one "
            "number: ask /classify",
            param="model",
        )
    renderer = await server.renderers.of(model.card)
    cut = cut_of(call, request, model.max_len)
    clips = _clips(request, model.max_len)
    if scores_pairs:
        _check_pairs(request, model)
        partners = first * len(second) if len(first) == 1 else first
        pairs = PairInputs(
            list(zip(partners, second, strict=True)), renderer, cut, params[1], clips
        )
        gathered, usage = await gather(call, model, request, pairs, Wanted(("labels",), 0))
        logits = stacked(gathered, "labels")
        scores: list[float] = activated(logits, card.activation, request.use_activation)[
            :, 0
        ].tolist()
        return scores, usage
    name = request.output or first_output(model)
    sides = []
    for texts, param, clip, role in zip((first, second), params, clips, _ROLES, strict=True):
        field = f"{role}_prompt_name"
        part = part_of({field: getattr(request, field)}, card, model.name, role)
        sides.append(
            TextInputs(
                texts,
                renderer,
                cut,
                prefixes=(part.prefix,),
                lower_case=card.lower_case,
                params=tuple(f"{param}[{n}]" for n in range(len(texts))),
                clips=[clip] * len(texts) if clip else (),
                form=card.roles.get(role),
            )
        )
    gathered, usage = await gather(call, model, request, Joined(sides), Wanted((name,), 0))
    positions = sum(len(each.piece.prompt) for each in gathered)
    scores = await server.run_prepared(
        4 * positions, similarities, gathered[: len(first)], gathered[len(first) :], name, card
    )
    return scores, usage


_ROLES = (QUERY, DOCUMENT)


def _check_pairs(request: ScoringRequest, model: ServedModel) -> None:
    """Raise `InvalidRequestError` for fields that a model of pairs does not have."""
    for name in ("output", "query_prompt_name", "document_prompt_name"):
        if getattr(request, name) is not None:
            raise InvalidRequestError(
                f"{name} is of embedding models; the model `{model.name}` reads pairs of texts",
                param=name,
            )


def _clips(request: ScoringRequest, max_len: int) -> tuple[int, int]:
    """Return the tokens kept of a query and of a document; 0 for all.

    Raises `InvalidRequestError` outside vLLM's range.
    """

    def checked(name: str) -> int:
        value: int = getattr(request, name) or 0
        if not 0 <= value < max_len:
            raise InvalidRequestError(
                f"{name} must be 0, for all, or less than the model's {max_len} positions, got "
                f"{value}",
                param=name,
            )
        return value

    return checked("max_tokens_per_query"), checked("max_tokens_per_doc")
