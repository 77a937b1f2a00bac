"""`POST /v1/responses`: translated to a chat and run by its code."""

import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from typing import Protocol

import msgspec

from inlay.api.fields import answer_id, own_names
from inlay.api.generation.chat import chat_model, chat_prompt, prepare_chat
from inlay.api.generation.messages import MessageReader, read_messages
from inlay.api.generation.respond import TOKEN_BYTES, respond
from inlay.api.openai.responses.input import (
    LOGPROBS,
    PARTS,
    ResponsesChat,
    check_responses,
    check_stateless,
    choice_of_tool,
    conversation,
    format_of,
    functions,
    in_input,
)
from inlay.api.openai.responses.shape import ResponsesShape
from inlay.api.openai.schema.responses import (
    ConversationRef,
    InputTokens,
    ReasoningOptions,
    Response,
    ResponsesRequest,
    TextOptions,
)
from inlay.api.schema.chat import ChatRequest
from inlay.http.parsed_request import ParsedRequest, read_request
from inlay.http.server import Call
from inlay.http.sse import NAMED, EventStream

_decoder = msgspec.json.Decoder(ResponsesRequest)


_OTHERWISE = {
    "messages", "max_tokens", "max_completion_tokens", "response_format", "n", "stream_options",
    "tools", "tool_choice", "top_logprobs",
}  # fmt: skip
_SAME = tuple(
    name
    for name in ResponsesRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__ and name not in _OTHERWISE
)
"""Fields with the same meaning in a chat."""

_FIELDS = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
    "logprobs": "include",
    "reasoning_effort": "reasoning.effort",
    "tools.*.function": "tools.*",
}
"""Fields of a chat, and the fields of a response they come from."""


@dataclass(frozen=True)
class Keeping:
    """Place of a response on a server that keeps some.

    Attributes:
        id: of the response; None makes one of `request_id` or at random.
        created_at: Unix time; None for now.
        store: it is kept.
        background: no client waits for it.
        previous: id of the response before it.
        conversation: id of its conversation.
        session: name of what it goes on with, whose prefix a worker has; None for none.
        keep: called with the whole response, before its client has it.
    """

    id: str | None = None
    created_at: int | None = None
    store: bool = False
    background: bool = False
    previous: str | None = None
    conversation: str | None = None
    session: str | None = None
    keep: Callable[[Response], Awaitable[None]] | None = None


class ResponseKeeper(Protocol):
    """Part of a frontend that keeps responses; its name in `Server.parts` is `KEEPER`."""

    async def create(self, call: Call, incoming: ParsedRequest[ResponsesRequest]) -> None:
        """Answer a request, by `answer`."""

    async def whole(
        self, call: Call, incoming: ParsedRequest[ResponsesRequest]
    ) -> ParsedRequest[ResponsesRequest]:
        """Return a request with what it goes on with in its input."""


KEEPER = "state"


async def responses(call: Call) -> None:
    """Answer one request."""
    incoming = await read_request(call, _decoder, in_input)
    keeper: ResponseKeeper | None = call.server.parts.get(KEEPER)
    if keeper is not None:
        await keeper.create(call, incoming)
        return
    check_stateless(incoming.parsed.request)
    await answer(call, incoming)


async def count_input(call: Call) -> None:
    """Answer with the positions that a request's prompt would have."""
    incoming = await read_request(call, _decoder, in_input)
    request, server = incoming.parsed.request, call.server
    keeper: ResponseKeeper | None = server.parts.get(KEEPER)
    if keeper is None:
        check_stateless(request)
    await server.run_prepared(call.memory.json, check_responses, request)
    if keeper is not None:
        incoming = await keeper.whole(call, incoming)
    said, chat = await server.run_prepared(incoming.size, _as_chat, request)
    model = chat_model(server, request.model)
    with own_names(_FIELDS):
        found = await chat_prompt(call, incoming, chat, model, _reader(said, request), request)
    await call.json(InputTokens(model.positions_before + len(found.prompt)))


def _reader(said: ResponsesChat, request: ResponsesRequest) -> MessageReader:
    sheds = request.truncation == "auto"
    return partial(read_messages, said.messages, named=said.named, served=PARTS, sheds=sheds)


async def answer(
    call: Call, incoming: ParsedRequest[ResponsesRequest], keeping: Keeping = Keeping()
) -> None:
    """Answer a request that has been read, all of its items in `input`."""
    server = call.server
    request = incoming.parsed.request
    await server.run_prepared(call.memory.json, check_responses, request)
    said, chat = await server.run_prepared(incoming.size, _as_chat, request)
    request.input = None  # the chat's messages have it from here on
    if keeping.session is not None and chat.session_id is None and chat.prompt_cache_key is None:
        chat.session_id = keeping.session
    # As in vLLM, request_id is the whole id here.
    response_id = keeping.id or answer_id(
        "resp_" if request.request_id is None else "", request.request_id
    )
    model = chat_model(server, request.model)
    made: list[ResponsesShape] = []
    with own_names(_FIELDS) as named:
        asked = await prepare_chat(
            call,
            incoming,
            chat,
            model,
            response_id,
            _reader(said, request),
            request,
        )
        del incoming, said
        generation = asked.generation

        def shape() -> ResponsesShape:
            sampling = generation.requests[0].sampling
            opening = opening_of(
                response_id,
                request,
                model.name,
                sampling.temperature,
                sampling.top_p,
                keeping,
                asked.dropped,
            )
            made.append(
                ResponsesShape(
                    opening,
                    generation,
                    asked.renderer,
                    chat.top_logprobs,
                    shows_reasoning=chat.include_reasoning is not False,
                )
            )
            return made[0]

        async def keep(_: EventStream | None) -> None:
            # Kept first: a client may name it as soon as it has read that it is complete.
            if keeping.keep is not None:
                tokens = generation.choices[0].completion_tokens
                size = generation.bulk + tokens * TOKEN_BYTES
                await keeping.keep(await server.run_prepared(size, made[0].response))

        await respond(call, chat, model, generation, shape, NAMED, keep, named)


def _as_chat(request: ResponsesRequest) -> tuple[ResponsesChat, ChatRequest]:
    said = conversation(request)
    logprobs = LOGPROBS in (request.include or ())
    return said, ChatRequest(
        messages=said.messages,
        tools=functions(request),
        tool_choice=choice_of_tool(request),
        max_completion_tokens=request.max_output_tokens,
        response_format=format_of(request),
        logprobs=logprobs,
        top_logprobs=(request.top_logprobs or 0) if logprobs else None,
        continue_final_message=said.continues or None,
        reasoning_effort=None if request.reasoning is None else request.reasoning.effort,
        **{name: getattr(request, name) for name in _SAME},
    )


def opening_of(
    response_id: str,
    request: ResponsesRequest,
    model: str,
    temperature: float,
    top_p: float,
    keeping: Keeping = Keeping(),
    dropped: int = 0,
) -> Response:
    """Return the response before its first output."""
    blank = {"description": None, "parameters": None, "strict": None}
    text = request.text or TextOptions()
    effort = None if request.reasoning is None else request.reasoning.effort
    return Response(
        id=response_id,
        created_at=keeping.created_at or int(time.time()),
        status="in_progress",
        background=keeping.background,
        conversation=None
        if keeping.conversation is None
        else ConversationRef(keeping.conversation),
        instructions=request.instructions,
        max_output_tokens=request.max_output_tokens,
        max_tool_calls=request.max_tool_calls,
        metadata=request.metadata or {},
        model=model,
        parallel_tool_calls=request.parallel_tool_calls is not False,
        previous_response_id=keeping.previous,
        prompt_cache_key=request.prompt_cache_key,
        prompt_cache_options=request.prompt_cache_options,
        prompt_cache_retention=request.prompt_cache_retention,
        reasoning=ReasoningOptions(effort),
        safety_identifier=request.safety_identifier,
        service_tier="flex" if request.service_tier == "flex" else "default",
        store=keeping.store,
        temperature=temperature,
        text=TextOptions(text.format or {"type": "text"}, text.verbosity or "medium"),
        tool_choice=request.tool_choice or "auto",
        tools=[{**blank, **tool} for tool in request.tools or ()],
        top_logprobs=request.top_logprobs or 0,
        top_p=top_p,
        truncation=request.truncation or "disabled",
        user=request.user,
        dropped_messages=dropped or msgspec.UNSET,
    )
