"""The language models before the one that answers, in a pipeline of several.

Each reads the chat as the client sent it, but for the last message of the user: where the model
before it gave text, that is its content; where it gave ids, they are in its place as they were
made; where it gave hidden states, their rows stand before its text. Embeddings and media of that
message are the first model's: what it gives is made of them.
"""

import uuid
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any

import msgspec

from inlay.api.generation.chat_kinds import Prepare, UpstreamInput
from inlay.api.generation.choices import ChoiceState, joined
from inlay.api.generation.generation import Generation, WholeSink
from inlay.api.generation.messages import MessageReader, ReadMessages
from inlay.api.generation.sampling import check_request
from inlay.api.schema.chat import ChatRequest
from inlay.base.errors import EngineError, InvalidRequestError, NotFoundError, OverloadedError
from inlay.http.parsed_request import ParsedRequest
from inlay.http.request_scope import RequestScope
from inlay.http.server import OFFLOAD_BYTES, Call, Server
from inlay.messages.card import ModelCard
from inlay.messages.digest import Secret, row_digests
from inlay.messages.hidden_states import HiddenStates
from inlay.messages.prompt import DTYPE_SIZES, Buffer, Rows, Tokens
from inlay.messages.request import EngineUsage, Payload, Task
from inlay.render import Renderer
from inlay.render.output import ContentDelta
from inlay.router import ServedModel
from inlay.tensors import Tensor, to_rows
from inlay_stages.cards import stage_card
from inlay_stages.graph import UNLIKE_TOKENIZERS, Graph


def resolve_model(server: Server, found: ServedModel) -> ServedModel:
    """Return the model that answers where a client names `found`.

    That may be an adapter of a model that writes before the one that answers.
    """
    stage = stage_card(found.card)
    if stage is None or stage.name not in stage.graph.before_text:
        return found
    return server.model(stage.graph.name, Task.GENERATE)


def adapters_before(server: Server, name: str | None) -> Mapping[str, str]:
    """Return the adapter that a client names, by the stage that it is of, if that writes before."""
    found = server.model(name, Task.GENERATE)
    stage = stage_card(found.card)
    if stage is None or stage.name not in stage.graph.before_text:
        return {}
    return {stage.name: found.name}


async def run_upstream(
    call: Call,
    incoming: ParsedRequest[Any],
    request: ChatRequest,
    graph: Graph,
    adapters: Mapping[str, str],
    response_id: str,
    messages: MessageReader,
    prepare: Prepare,
) -> UpstreamInput:
    """Have the models before the one that answers write; return what that one reads.

    A place at each of them is taken first, and at the one that answers. `adapters` are those that
    they use, by their stages.

    Raises:
        ClientGone: the client left.
        InvalidRequestError: embeddings or media before the user's last message.
        RateLimitedError: one of the models is full; none has worked.
        OverloadedError: one of them is asleep, and requests do not wait for that; likewise.
        InlayError: a model has no worker, or its request was refused or failed.
    """
    server = call.server
    check_request(call, request)
    if incoming.sources:
        await server.run_prepared(call.memory.json, _check_first_models, messages, graph.name)
    without = replace(incoming, sources=(), parts=None)
    names = [*graph.before_text, graph.front]
    cards = {name: _card(call, graph, name) for name in names}
    await _check_tokenizers(server, graph, cards)
    found = messages
    usages: dict[str, EngineUsage] = {}
    wanted = {cards[name].name: 1 for name in graph.before_text}
    wanted[cards[graph.front].name] = request.n or 1
    for model_name in wanted:
        server.check_awake(model_name, Task.GENERATE)
    call.ending.enter_context(server.router.admit(wanted, call.client))
    async with RequestScope(server.inflight, call.receive):
        for model_name in wanted:
            await server.awake(model_name, Task.GENERATE)
        for name, following in pairwise(names):
            own = _request(request, graph, name, adapters.get(name))
            # Two clients may have chosen the same id of their answers.
            id_ = f"{response_id}-{name}-{uuid.uuid4().hex}"
            model = server.model(own.model, Task.GENERATE)
            prepared = await prepare(call, incoming, own, model, id_, found, own)
            incoming = without
            port = graph.fed_on(following)
            if port == "hidden":
                _ask_for_hidden(prepared.generation, graph, name, cards[name])
            prepared.generation.bypass_queue = True
            await _run(call, prepared.generation, cards[name].name)
            (choice,) = prepared.generation.choices
            usages[name] = EngineUsage(*prepared.generation.usage()[:2])
            if port == "hidden":
                size = sum(len(payload.data) for payload in choice.payloads)
                call.reservation.grow(2 * size)
                rows = await server.run_prepared(
                    size, _rows, choice.payloads, cards[following], server.secret
                )
                found = partial(_with_rows, messages, rows)
            elif port == "tokens":
                found = partial(_with_ids, messages, _ids(choice))
            else:
                found = partial(_with_text, messages, _text(choice))
    return UpstreamInput(incoming, found, graph.front, usages)


async def _check_tokenizers(server: Server, graph: Graph, cards: Mapping[str, ModelCard]) -> None:
    """Raise `EngineError` where ids go to a model to which they are other tokens."""
    for start, end in graph.links:
        if end.name == "tokens":
            renderers = [await server.renderers.of(cards[port.stage]) for port in (start, end)]
            if await server.run_prepared(OFFLOAD_BYTES, _differ, *renderers):
                raise EngineError(f"{start} -> {end}: {UNLIKE_TOKENIZERS}")


def _differ(one: Renderer, other: Renderer) -> bool:
    return one.vocabulary_id != other.vocabulary_id


def _check_first_models(messages: MessageReader, pipeline: str) -> None:
    """Raise `InvalidRequestError` for embeddings or media that are no first model's alone."""
    chat = _of_text(messages)
    last = _last_of_user(chat)
    for number, message in enumerate(chat.messages):
        parts = [message.get(name) for name in ("reasoning", "content")]
        texts = all(_is_text(each) for part in parts if isinstance(part, list) for each in part)
        if number != last and not texts:
            raise InvalidRequestError(
                f"the pipeline `{pipeline}` is several language models in a row; embeddings and "
                "media may stand in the user's last message alone, which its first model reads",
                param="messages",
            )


def _of_text(messages: MessageReader) -> ReadMessages:
    """Return the messages with nothing behind the parts that are not text."""
    chat = messages(
        lambda _: Rows(Buffer(b""), "float32", (0, 1)),
        lambda source: None if source.of_answer else (),
    )
    return chat._replace(rows=[], media=[], kinds=[])


def _is_text(part: dict[str, Any]) -> bool:
    return bool(part["type"] == "text")


def _card(call: Call, graph: Graph, stage: str) -> ModelCard:
    try:
        return call.server.router.card(graph.served_name(stage))
    except NotFoundError as error:
        raise OverloadedError(
            f"no worker of the stage {stage} of `{graph.name}` is ready", retry_after=1
        ) from error


def _request(request: ChatRequest, graph: Graph, stage: str, adapter: str | None) -> ChatRequest:
    """Return a stage's request: what the client says of sampling, none of what it says of form."""
    return ChatRequest(
        model=adapter or graph.served_name(stage),
        messages=[],
        max_tokens=graph.stages[stage].max_tokens,
        temperature=request.temperature,
        top_p=request.top_p,
        top_k=request.top_k,
        min_p=request.min_p,
        seed=request.seed,
        priority=request.priority,
        cache_salt=request.cache_salt,
    )


def _ask_for_hidden(generation: Generation, graph: Graph, stage: str, card: ModelCard) -> None:
    asked, layers = graph.stages[stage].hidden, card.hidden_layers
    if layers is None or not -layers - 1 <= asked.layer <= layers:
        raise EngineError(
            f"stages.{stage}.hidden.layer is {asked.layer}; the worker gives "
            + ("none" if layers is None else f"{-layers - 1} to {layers}")
        )
    output = asked.positions == "output"
    (asking,) = generation.requests
    sampling = asking.sampling
    states = HiddenStates(
        layers=(asked.layer % (layers + 1),), prompt=0 if output else -1, output=output
    )
    params = msgspec.structs.replace(
        sampling, hidden_states=states, max_tokens=sampling.max_tokens if output else 0
    )
    generation.requests = [msgspec.structs.replace(asking, params=params)]


async def _run(call: Call, generation: Generation, model: str) -> None:
    with closing(generation):
        await call.server.awake(model)
        await generation.start(call.server.router, model, session=None)
        await generation.each(WholeSink())


def _text(choice: ChoiceState) -> str:
    """Return the answer without its reasoning."""
    deltas = joined(choice.pieces).output
    return "".join(delta.text for delta in deltas if isinstance(delta, ContentDelta))


def _ids(choice: ChoiceState) -> Tokens:
    """Return the ids of the answer but for the one that ended it."""
    whole = joined(choice.pieces)
    return Tokens(whole.token_ids[: -1 if whole.finish_reason == "stop" else None])


def _rows(payloads: list[Payload], card: ModelCard, secret: Secret) -> Rows:
    """Return hidden states as rows of the model of `card`. Raises `EmbeddingsError`."""
    if not payloads:
        raise EngineError("the worker ended the request without hidden states")
    data = Buffer(b"".join(payload.data.view for payload in payloads))
    dtype, width = payloads[0].dtype, payloads[0].shape[1]
    shape = len(data) // (width * DTYPE_SIZES[dtype]), width
    tensor = Tensor(data, dtype, shape, "safetensors")
    rows = to_rows(tensor, hidden_size=card.hidden_size, dtype=card.dtype)
    return msgspec.structs.replace(rows, digests=row_digests(rows, secret))


def _with_ids(messages: MessageReader, ids: Tokens, *_: Any) -> ReadMessages:
    part = {"type": "prompt_embeds", "index": 0}
    return _changed(_of_text(messages), lambda _: [part])._replace(rows=[ids])


def _with_text(messages: MessageReader, text: str, *_: Any) -> ReadMessages:
    return _changed(_of_text(messages), lambda _: text)


def _with_rows(messages: MessageReader, rows: Rows, *_: Any) -> ReadMessages:
    def before(content: Any) -> list[dict[str, Any]]:
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content or ()
        return [{"type": "prompt_embeds", "index": 0}, *filter(_is_text, parts)]

    return _changed(_of_text(messages), before)._replace(rows=[rows])


def _changed(chat: ReadMessages, change: Callable[[Any], Any]) -> ReadMessages:
    """Return the messages with the content of the user's last one changed."""
    index = _last_of_user(chat)
    message = chat.messages[index]
    new = {**message, "content": change(message.get("content"))}
    return chat._replace(messages=[*chat.messages[:index], new, *chat.messages[index + 1 :]])


def _last_of_user(chat: ReadMessages) -> int:
    for index in range(len(chat.messages) - 1, -1, -1):
        if chat.messages[index]["role"] == "user":
            return index
    raise InvalidRequestError(
        "messages has no message of the user, in which a model gives its answer to the next",
        param="messages",
    )
