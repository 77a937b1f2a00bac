"""`POST /v1/embeddings`."""

import uuid
from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec
import orjson
import pybase64

from inlay.errors import InvalidRequestError
from inlay.frontend.bodies.embeds import Embeddings
from inlay.frontend.bodies.sources import in_prompt_embeds
from inlay.frontend.generation.prompts import kept_positions, truncated
from inlay.frontend.generation.sampling import check_ids
from inlay.frontend.incoming import read_request
from inlay.frontend.references import embeddings_of
from inlay.frontend.server import JSON, Call
from inlay.frontend.vectors.gathering import (
    Array,
    Gathering,
    check_count,
    check_texts_request,
    embedding_card,
    normalized,
)
from inlay.frontend.vectors.inputs import Cut, Inputs, Prompts, Texts
from inlay.prompt import Prompt, Tokens
from inlay.protocol.embedding import EmbeddingCard
from inlay.protocol.openai.embeddings import EmbeddingRequest, TextsRequest, TextsUsage
from inlay.protocol.work import Task
from inlay.render import Renderer
from inlay.router import ServedModel

_decoder = msgspec.json.Decoder(EmbeddingRequest)
_encode = msgspec.json.Encoder().encode

_SHOWN_FLOAT, _SHOWN_BASE64 = 14, 6
"""Bytes an element takes in a response, about."""


class _Data(msgspec.Struct, frozen=True):
    """`EmbeddingData` whose numbers are JSON already."""

    object: Literal["embedding"]
    index: int
    embedding: msgspec.Raw | str


class _Response(msgspec.Struct, frozen=True):
    """`EmbeddingResponse` of such."""

    object: Literal["list"]
    data: list[_Data]
    model: str
    usage: TextsUsage


class Shown(NamedTuple):
    """How vectors are shown.

    Attributes:
        dimensions: first elements that are kept, or None for all.
        normalize: whether they get length 1.
        base64: whether they are shown as base64.
    """

    dimensions: int | None
    normalize: bool
    base64: bool

    @classmethod
    def of(cls, request: EmbeddingRequest, card: EmbeddingCard, model: str) -> "Shown":
        """What a request asks for. Raises `InvalidRequestError` for what the model does not allow."""
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
            raise InvalidRequestError("normalize and use_activation say different things", param="normalize")
        normalize = request.use_activation if request.normalize is None else request.normalize
        if normalize is None:
            # A shortened vector without its length means nothing.
            normalize = card.normalize or asked is not None
        if card.unit and not normalize:
            raise InvalidRequestError(
                f"normalize may only be true: the engine of the model `{model}` gives vectors length 1",
                param="normalize",
            )
        return cls(asked, normalize, request.encoding_format == "base64")


def _allowed(card: EmbeddingCard) -> str:
    if card.any_dimensions:
        return f"1 to {card.size}"
    return " or ".join(map(str, (*card.dimensions, card.size)[-8:]))


async def embeddings(call: Call) -> None:
    """Answer with the embeddings of texts, ids or rows."""
    server = call.server
    incoming = await read_request(call, _decoder, server.embeds.in_embedding)
    request = incoming.parsed.request
    check_texts_request(call, request)
    model = server.model(request.model)
    card = embedding_card(model, Task.EMBED)
    shown = Shown.of(request, card, model.name)
    renderer = await server.renderers.of(model.card)
    rows = await embeddings_of(call, incoming, in_prompt_embeds(request.prompt_embeds), model.card)
    inputs = await server.prepare(incoming.size, _inputs, call, request, model, card, renderer, rows)
    check_count(call, len(inputs), "input")
    size = incoming.size
    del incoming, rows
    elements = len(inputs) * card.size
    call.reservation.grow(elements * (4 + (_SHOWN_BASE64 if shown.base64 else _SHOWN_FLOAT)))
    gathering = Gathering(call, model, request, f"embd-{uuid.uuid4().hex}")
    vectors = await gathering.vectors(inputs, card.size)
    server.metrics.embedded(model.card.name, len(inputs), gathering.positions, call.began)
    usage = TextsUsage(gathering.positions, gathering.positions)
    body = await server.prepare(max(size, 4 * elements), _body, vectors, shown, model.name, usage)
    await call.bytes(body, JSON)


def cut_of(request: TextsRequest, limit: int) -> Cut:
    """How a request wants its inputs to fit. Raises `InvalidRequestError` for more than the model takes."""
    return Cut(limit, kept_positions(request, limit, 0), request.truncation_side or "right")


def _inputs(
    call: Call,
    request: EmbeddingRequest,
    model: ServedModel,
    card: EmbeddingCard,
    renderer: Renderer,
    embeddings: Embeddings,
) -> Inputs:
    """What is to be embedded. CPU work.

    Raises:
        InvalidRequestError: nothing, several kinds at once, or what is not for the model.
    """
    cut = cut_of(request, model.max_len)
    given = request.input
    if request.prompt_embeds is not None and request.prompt_embeds != []:
        if given not in (None, "", []):
            raise InvalidRequestError("give either input or prompt_embeds", param="input")
        _check_no_prompt(request)
        found = [
            Prompt.of(rows)
            for source in in_prompt_embeds(request.prompt_embeds)
            for rows in embeddings.prompts(source)
        ]
        return _prompts(found, cut, "prompt_embeds")
    if given is None or given in ("", []):
        raise InvalidRequestError("input must be given and must not be empty", param="input")
    check_count(
        call, 1 if isinstance(given, str) else sum(not isinstance(item, int) for item in given), "input"
    )
    texts = [given] if isinstance(given, str) else [item for item in given if isinstance(item, str)]
    if texts and (isinstance(given, str) or len(texts) == len(given)):
        if "" in texts:
            where = "input" if isinstance(given, str) else f"input[{texts.index('')}]"
            raise InvalidRequestError(f"{where} is an empty string, which has no embedding", param=where)
        return Texts(
            texts,
            renderer,
            cut,
            prefix=_prefix(request, card, model.name),
            lower_case=card.lower_case,
            special=request.add_special_tokens is not False,
            params=("input",) if isinstance(given, str) else (),
        )
    _check_no_prompt(request)
    ids = _id_lists([item for item in given if not isinstance(item, str)], whole=not texts)
    for index, each in enumerate(ids):
        where = "input" if isinstance(given[0], int) else f"input[{index}]"
        if not each:
            raise InvalidRequestError(f"{where} is empty", param=where)
        check_ids(each, model.card.vocab_size, where)
    return _prompts([Prompt.of(Tokens(each)) for each in ids], cut, "input")


def _id_lists(given: "Sequence[int | list[int]]", *, whole: bool) -> list[list[int]]:
    lists = [item for item in given if isinstance(item, list)]
    flat = [item for item in given if isinstance(item, int)]
    if not whole or (lists and flat):
        raise InvalidRequestError(
            "input is a string, a list of strings, a list of token ids, or a list of lists of token ids; got a list of several of "
            "these",
            param="input",
        )
    return lists or [flat]


def _prompts(prompts: list[Prompt], cut: Cut, param: str) -> Prompts:
    if cut.keep is not None:
        prompts = [truncated(prompt, cut.keep, cut.side) for prompt in prompts]
    for index, prompt in enumerate(prompts):
        cut.check(len(prompt), f"{param}[{index}]")
        if not len(prompt):
            raise InvalidRequestError(f"{param}[{index}] has no positions", param=param)
    return Prompts(prompts)


def _prefix(request: EmbeddingRequest, card: EmbeddingCard, model: str) -> str:
    """The prompt that is put before each text."""
    name = request.prompt_name
    if name is None:
        return "" if card.default_prompt is None else card.prompts.get(card.default_prompt, "")
    if name not in card.prompts:
        known = ", ".join(sorted(card.prompts)) or "it has none"
        raise InvalidRequestError(
            f"the model `{model}` has no prompt {name[:80]!r}; its prompts: {known}", param="prompt_name"
        )
    return card.prompts[name]


def _check_no_prompt(request: EmbeddingRequest) -> None:
    if request.prompt_name is not None:
        raise InvalidRequestError(
            "prompt_name is put before texts; token ids and prompt_embeds are taken as they are",
            param="prompt_name",
        )


def _body(vectors: Array, shown: Shown, model: str, usage: TextsUsage) -> bytes:
    """The response. CPU work."""
    vectors = vectors[:, : shown.dimensions]
    if shown.normalize:
        vectors = normalized(vectors)
    data = [_Data("embedding", index, _shown(row, shown)) for index, row in enumerate(vectors)]
    return _encode(_Response("list", data, model, usage))


def _shown(row: Array, shown: Shown) -> msgspec.Raw | str:
    if shown.base64:
        return pybase64.b64encode_as_string(row.astype("<f4", copy=False).data)
    return msgspec.Raw(orjson.dumps(row, option=orjson.OPT_SERIALIZE_NUMPY))


__all__ = ["cut_of", "embeddings"]
