"""`POST /v1/messages` and `/v1/messages/count_tokens`: translated to chats and run as those."""

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, TypeVar

import msgspec

from inlay.api.anthropic.input import (
    AnthropicChat,
    choice_of_tool,
    conversation,
    format_of,
    functions,
    thinking_of,
)
from inlay.api.anthropic.schema import MessagesInput, MessagesRequest, TokenCount
from inlay.api.anthropic.shape import MessagesShape
from inlay.api.fields import answer_id, check_unserved, own_names
from inlay.api.generation.chat import chat_model, chat_prompt, prepare_chat
from inlay.api.generation.messages import read_messages
from inlay.api.generation.output_format import has_thinking_budget
from inlay.api.generation.respond import respond
from inlay.api.parameters import VERSIONS
from inlay.api.schema.chat import ChatRequest
from inlay.base.errors import InvalidRequestError
from inlay.http.bodies.embeds import Source
from inlay.http.parsed_request import ParsedRequest, read_request
from inlay.http.server import Call
from inlay.http.sse import NAMED
from inlay.messages.card import ModelCard
from inlay.messages.request import Task

_decoder = msgspec.json.Decoder(MessagesRequest)
_count_decoder = msgspec.json.Decoder(MessagesInput)

_OTHERWISE = {"messages", "tools", "tool_choice"}
_SAME = tuple(
    name
    for name in MessagesRequest.__struct_fields__
    if name in ChatRequest.__struct_fields__ and name not in _OTHERWISE
)
"""Fields with the same meaning in a chat."""

_FIELDS = {
    "stop": "stop_sequences",
    "response_format": "output_config.format",
    "reasoning_effort": "output_config.effort",
    "thinking_token_budget": "thinking.budget_tokens",
    "continue_final_message": "messages",
    "tools.*.function.parameters": "tools.*.input_schema",
    "tools.*.function": "tools.*",
}
"""Fields of a chat, and the fields of a request they come from."""

T = TypeVar("T", bound=MessagesInput)


class _ParsedMessages(NamedTuple):
    """A request, parsed and translated."""

    incoming: ParsedRequest[Any]
    said: AnthropicChat
    chat: ChatRequest


async def messages(call: Call) -> None:
    """Answer one request."""
    asked = await _read(call, _decoder)
    request: MessagesRequest = asked.incoming.parsed.request
    response_id = answer_id("msg_", request.request_id)
    chat = asked.chat
    model = chat_model(call.server, chat.model)
    await _fit_budget(call, chat, model.card)
    with own_names(_FIELDS) as named:
        ready = await prepare_chat(
            call, asked.incoming, chat, model, response_id, _reader(asked.said), request
        )
        del asked
        shape = partial(
            MessagesShape,
            response_id,
            model.name,
            ready.generation,
            call.request_id,
            shows_thinking=chat.include_reasoning is not False,
        )
        await respond(call, chat, model, ready.generation, shape, NAMED, named=named)


async def _fit_budget(call: Call, chat: ChatRequest, card: ModelCard) -> None:
    """Drop a thinking budget where none can be held: agents send one to every model."""
    if chat.thinking_token_budget is not None:
        renderer = await call.server.renderers.of(card)
        if not has_thinking_budget(call.server.settings, renderer):
            chat.thinking_token_budget = None


async def count_tokens(call: Call) -> None:
    """Answer with the positions of a request's prompt."""
    asked = await _read(call, _count_decoder)
    request = asked.incoming.parsed.request
    model = call.server.model(request.model, Task.GENERATE)
    with own_names(_FIELDS):
        found = await chat_prompt(
            call, asked.incoming, asked.chat, model, _reader(asked.said), request
        )
    await call.json(TokenCount(model.positions_before + len(found.prompt)))


def _reader(said: AnthropicChat) -> Callable[..., Any]:
    return partial(read_messages, said.messages)


def check_version(call: Call) -> None:
    """Raise `InvalidRequestError` for a version of the API that is not served."""
    version = call.headers.get(b"anthropic-version")
    if version is not None and version not in VERSIONS:
        raise InvalidRequestError(
            f"anthropic-version must be {b' or '.join(VERSIONS).decode()}, got "
            f"{version[:40].decode('latin-1')!r}",
            param="anthropic-version",
        )


async def _read(call: Call, decoder: msgspec.json.Decoder[T]) -> _ParsedMessages:
    """Read, check and translate a request."""
    check_version(call)
    said: list[AnthropicChat] = []

    def sources(request: T) -> list[Source]:
        # Again where the body is parsed a second time: the last one is of the request returned.
        said[:] = [conversation(request)]
        return said[0].sources

    incoming = await read_request(call, decoder, sources)
    request = incoming.parsed.request
    check_unserved(request)
    chat = await call.server.run_prepared(incoming.size, _as_chat, request, said[0])
    request.messages = []  # the chat's messages have them from here on
    return _ParsedMessages(incoming, said[0], chat)


def _as_chat(request: MessagesInput, said: AnthropicChat) -> ChatRequest:
    thinking = thinking_of(request)
    choice = request.tool_choice or {}
    effort = None if request.output_config is None else request.output_config.effort
    fields = {name: getattr(request, name, None) for name in _SAME}
    fields["chat_template_kwargs"] = {**thinking.variables, **(request.chat_template_kwargs or {})}
    return ChatRequest(
        messages=said.messages,
        tools=functions(request),
        tool_choice=choice_of_tool(request),
        parallel_tool_calls=choice.get("disable_parallel_tool_use") is not True,
        stop=getattr(request, "stop_sequences", None),
        response_format=format_of(request),
        reasoning_effort=effort,
        include_reasoning=thinking.shown,
        thinking_token_budget=thinking.budget,
        continue_final_message=said.continues or None,
        **fields,
    )
