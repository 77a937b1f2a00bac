"""`POST /v1/score` and `POST /v1/rerank`.

Cross-encoders by their own scores, embedding models by the likeness of one of their outputs.
"""

import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import msgspec

from inlay.api.fields import answer_id, check_common, own_names
from inlay.api.openai.embeddings.aliases import take_rank_aliases
from inlay.api.openai.embeddings.gathering import (
    Gathered,
    WantedOutputs,
    activated,
    bytes_of,
    check_count,
    embedding_card,
    first_output,
    gather,
    stacked,
)
from inlay.api.openai.embeddings.inputs import Joined, PairInputs, TemplatedPairs
from inlay.api.openai.embeddings.prompts import cut_of
from inlay.api.openai.embeddings.roles import DOCUMENT, QUERY, part_of
from inlay.api.openai.embeddings.sides import Item, Reading, Side, ToCompute, in_fields
from inlay.api.openai.embeddings.similarity import Comparison
from inlay.api.openai.embeddings.stored import stored_documents
from inlay.api.openai.schema.embeddings import TextsUsage
from inlay.api.openai.schema.scoring import (
    RankedDocument,
    RankingRequest,
    RerankMeta,
    RerankRequest,
    RerankResponse,
    RerankResult,
    RerankUsage,
    ScoreData,
    ScoreRequest,
    ScoreResponse,
    ScoringRequest,
    SearchUnits,
)
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Source
from inlay.http.parsed_request import ParsedRequest, read_request
from inlay.http.references import embeddings_of
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call
from inlay.messages.request import Task
from inlay.router import ServedModel

_score_decoder = msgspec.json.Decoder(ScoreRequest)
_rerank_decoder = msgspec.json.Decoder(RerankRequest)

_SEARCH_UNIT = 100
"""Documents that Cohere counts as one search."""

_FIRST = ("text_1", "queries", "data_1")
_SECOND = ("text_2", "documents", "items", "data_2")


async def score(call: Call) -> None:
    """Answer with the similarity scores of pairs."""
    incoming = await read_request(call, _score_decoder, _in_score)
    request = incoming.parsed.request
    check_common(call, request)
    id_ = answer_id("score-", request.request_id)
    model = call.server.model(request.model, Task.SCORE, Task.EMBED)
    first, second = (_side(call, request, names) for names in (_FIRST, _SECOND))
    if len(first.items) not in (1, len(second.items)):
        raise InvalidRequestError(
            f"{first.param} has {len(first.items)} texts and {second.param} "
            f"{len(second.items)}; give one, or as many as there are on the other side",
            param=first.param,
        )
    scores, usage = await _scores(call, model, incoming, first, second)
    data = [ScoreData(index=index, score=each) for index, each in enumerate(scores)]
    await call.json(
        ScoreResponse(id=id_, created=int(time.time()), model=model.name, data=data, usage=usage)
    )


async def rerank(call: Call) -> None:
    """Answer with documents ranked by relevance to a query."""
    await rerank_documents(call, await read_request(call, _rerank_decoder, in_rerank))


async def rerank_v2(call: Call) -> None:
    """As `rerank`, in Cohere's way: long texts are cut, and the answer has metadata.

    `max_tokens_per_doc` may be beyond the model's limit: its clients send 4,096 to all models.
    """
    incoming = await read_request(call, _rerank_decoder, in_rerank)
    request = incoming.parsed.request
    take_rank_aliases(request)
    if request.auto_truncate is None and request.truncate_prompt_tokens is None:
        request.auto_truncate = True
    limit = call.server.model(request.model, Task.SCORE, Task.EMBED).max_len
    if (request.max_tokens_per_doc or 0) >= limit:
        request.max_tokens_per_doc = None
    await rerank_documents(call, incoming, meta=True)


async def rerank_documents(call: Call, incoming: ParsedRequest[Any], *, meta: bool = False) -> None:
    """Answer a request with `documents`; with `meta` that of `/v2/rerank` too."""
    request: RerankRequest = incoming.parsed.request
    voyage, names = take_rank_aliases(request)
    with own_names(names):
        await _rank(call, incoming, voyage=voyage, meta=meta)


async def _rank(call: Call, incoming: ParsedRequest[Any], *, voyage: bool, meta: bool) -> None:
    request: RerankRequest = incoming.parsed.request
    id_ = answer_id("score-", request.request_id)
    if request.top_n is not None and request.top_n < 0:
        raise InvalidRequestError(f"top_n must be 0 or more, got {request.top_n}", param="top_n")
    documents = counted(call, request.documents, "documents")
    query = counted(call, request.query, "query")
    scores, used, model = await scored(call, incoming, query, documents)
    shows = request.return_documents is not False

    def ranked() -> RerankResponse:
        best = sorted(range(len(scores)), key=lambda index: -scores[index])
        results = [
            RerankResult(
                index=index,
                document=_ranked(documents.items[index]) if shows else msgspec.UNSET,
                relevance_score=scores[index],
            )
            for index in best[: request.top_n or None]
        ]
        units = SearchUnits(-(-len(scores) // _SEARCH_UNIT))
        return RerankResponse(
            id=id_,
            model=model.name,
            usage=RerankUsage(used.prompt_tokens, used.total_tokens),
            results=msgspec.UNSET if voyage else results,
            data=results if voyage else msgspec.UNSET,
            meta=RerankMeta(units) if meta else msgspec.UNSET,
        )

    await call.prepared_json(incoming.size, ranked)


async def scored(
    call: Call, incoming: ParsedRequest[Any], query: Side, documents: Side
) -> tuple[list[float], TextsUsage, ServedModel]:
    """Return the score of each document, the usage, and the model.

    Raises:
        InlayError: the request is not valid, or failed.
    """
    request: RankingRequest = incoming.parsed.request
    check_common(call, request)
    model = call.server.model(request.model, Task.SCORE, Task.EMBED)
    scores, used = await _scores(call, model, incoming, query, documents)
    return scores, used, model


def _ranked(item: Item) -> RankedDocument:
    if isinstance(item, str):
        return RankedDocument(item)
    return RankedDocument(None, ref=msgspec.UNSET if item.ref is None else item.ref)


def _in_score(request: ScoreRequest) -> list[Source]:
    return in_fields(request, *_FIRST, *_SECOND)


def in_rerank(request: RankingRequest) -> list[Source]:
    """Return the sources of embeddings and media in a request, in order."""
    return in_fields(request, "query", "documents")


def counted(call: Call, given: Item | Sequence[Item], param: str) -> Side:
    """Return the side in a field of a request, whose items are counted before they are read.

    Raises `InvalidRequestError` for too many, and as `Side.of`.
    """
    check_count(call, len(given) if isinstance(given, list) else 1, param)
    return Side.of(given, param)


def _side(call: Call, request: ScoreRequest, names: Sequence[str]) -> Side:
    """Return the side whose field of `names` is given.

    Raises `InvalidRequestError` for none or several of them, and as `Side.of`.
    """
    given = [name for name in names if getattr(request, name) is not None]
    if len(given) != 1:
        raise InvalidRequestError(
            f"give exactly one of {', '.join(names)}, got {' and '.join(given) or 'none'}",
            param=(given or names)[0],
        )
    return counted(call, getattr(request, given[0]), given[0])


async def _scores(
    call: Call, model: ServedModel, incoming: ParsedRequest[Any], first: Side, second: Side
) -> tuple[list[float], TextsUsage]:
    """Return the score of each item in `second` with its partner in `first`; one may serve all.

    Raises `InlayError` for items, and fields, that the model does not take.
    """
    card = embedding_card(model)
    if Task.SCORE not in model.card.tasks:
        return await _similarities(call, model, incoming, first, second)
    if card.size != 1:
        raise InvalidRequestError(
            f"the model `{model.name}` has {card.size} labels for a pair, and a score is one "
            "number: ask /classify",
            param="model",
        )
    request: ScoringRequest = incoming.parsed.request
    _check_pairs(request, model, card.templated)
    queries, documents = first.texts(model.name), second.texts(model.name)
    kind = (
        partial(TemplatedPairs, instruction=request.instruction, default=card.instruction)
        if card.templated
        else PairInputs
    )
    pairs = kind(
        list(
            zip(queries * len(documents) if len(queries) == 1 else queries, documents, strict=True)
        ),
        await call.server.renderers.of(model.card),
        cut_of(call, request, model.max_len),
        second.param,
        _clips(request, model.max_len),
    )
    gathered, usage = await gather(call, model, request, pairs, WantedOutputs(("labels",), 0))
    logits = stacked(gathered, "labels")
    scores: list[float] = activated(logits, card.activation, request.use_activation)[:, 0].tolist()
    return scores, usage


async def _similarities(
    call: Call, model: ServedModel, incoming: ParsedRequest[Any], first: Side, second: Side
) -> tuple[list[float], TextsUsage]:
    """As `_scores`, by vectors. What is not stored is computed together."""
    server, card = call.server, embedding_card(model)
    request: ScoringRequest = incoming.parsed.request
    _check_instruction(request, model, templated=False)
    clips = _clips(request, model.max_len)
    prefixes = [
        part_of({name: getattr(request, name)}, card, model.name, role).prefix
        for role, (name, _) in zip(_ROLES, _OF_TEXTS, strict=True)
    ]

    def check() -> None:
        for side, names in zip((first, second), _OF_TEXTS, strict=True):
            side.check([name for name in names if getattr(request, name)])

    await server.run_prepared(incoming.size, check)
    name = request.output or first_output(model)
    async with _scope(call):
        stored = [
            await stored_documents(call, side.refs, model, name, role)
            for side, role in zip((first, second), _ROLES, strict=True)
        ]
        reading = Reading(
            model,
            await server.renderers.of(model.card),
            cut_of(call, request, model.max_len),
            await embeddings_of(call, incoming, model.card),
        )

        def read() -> list[ToCompute]:
            each = zip((first, second), _ROLES, prefixes, clips, strict=True)
            return [reading.inputs(*one) for one in each]

        sides = await server.run_prepared(incoming.size, read)
    inputs = Joined([each for side in sides for each in side.inputs])
    gathered: list[Gathered] = []
    usage = TextsUsage(0, 0)
    if len(inputs):
        # Of positions those that are compared are copied.
        wanted = WantedOutputs((name,), 4)
        gathered, usage = await gather(call, model, request, inputs, wanted)
    output = next((each for each in card.outputs if each.name == name), None)

    def compared() -> Comparison:
        parts = gathered[: len(sides[0])], gathered[len(sides[0]) :]
        asked, found = (
            side.bundles(part, own, name, card)
            for side, part, own in zip(sides, parts, stored, strict=True)
        )
        return Comparison(asked, found, name)

    async with _scope(call):
        size = bytes_of(gathered, usage) + 1024 * len(second.items)
        comparison = await server.run_prepared(size, compared)
        comparison.check(first.param, second.param)
        call.reservation.grow(comparison.num_bytes)
        scores = await server.run_prepared(
            comparison.size, comparison.scores, mean=output is not None and output.mean
        )
    return scores, usage


def _scope(call: Call) -> RequestScope:
    return RequestScope(call.server.inflight, call.receive, call.detach_deadline())


_ROLES = (QUERY, DOCUMENT)
_OF_TEXTS = (
    ("query_prompt_name", "max_tokens_per_query"),
    ("document_prompt_name", "max_tokens_per_doc"),
)
"""Fields of a request that change the texts of each side."""


def _check_pairs(request: ScoringRequest, model: ServedModel, templated: bool) -> None:
    """Raise `InvalidRequestError` for fields that a model of pairs does not have."""
    _check_instruction(request, model, templated)
    if templated and request.truncation_side == "left":
        raise InvalidRequestError(
            "truncation_side may only be right: of a document in a score template the first "
            "tokens are kept",
            param="truncation_side",
        )
    for name in ("output", "query_prompt_name", "document_prompt_name"):
        if getattr(request, name) is not None:
            raise InvalidRequestError(
                f"{name} is of embedding models; the model `{model.name}` reads pairs of texts",
                param=name,
            )


def _check_instruction(request: ScoringRequest, model: ServedModel, templated: bool) -> None:
    if request.instruction is not None and not templated:
        raise InvalidRequestError(
            f"instruction is a variable of a score template; the model `{model.name}` reads texts "
            "without a chat template",
            param="instruction",
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
