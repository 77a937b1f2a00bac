"""Preparation of a chat: from its messages to a generation."""

from typing import Any, NamedTuple, NoReturn

import msgspec

from inlay.api.fields import check_depths, in_own_names
from inlay.api.generation.chat_kinds import ChatKind
from inlay.api.generation.generation import Generation, generation_of
from inlay.api.generation.grammars import grammar_of, own_fields
from inlay.api.generation.hidden_states import StatesPlan
from inlay.api.generation.messages import MessageReader, ReadMessages
from inlay.api.generation.output_format import (
    ModelFormats,
    check_tool_use,
    output_format_for,
)
from inlay.api.generation.sampling import check_request, sampling_of
from inlay.api.generation.tools import NO_TOOLS, ToolUse
from inlay.api.generation.truncation import Truncation
from inlay.api.generation.turns import shortened
from inlay.api.schema.chat import ChatRequest
from inlay.base.errors import InvalidRequestError
from inlay.extension import parts
from inlay.http.bodies.accounting import size_of
from inlay.http.bodies.embeds import Embeddings
from inlay.http.parsed_request import ParsedRequest
from inlay.http.quoting import shown_value
from inlay.http.references import embeddings_of
from inlay.http.server import Call, Server
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Prompt
from inlay.messages.request import Grammar, Task
from inlay.render import Renderer, Side
from inlay.router import ServedModel

_OF_OTHERS = (
    "audio", "size", "num_inference_steps", "guidance_scale", "negative_prompt", "output_format"
)  # fmt: skip
"""Fields of what is no text."""

DROPPED_HEADER = b"x-dropped-messages"
"""Header of an answer: the messages that were left out for it."""


def kind_of(request: ChatRequest, card: ModelCard) -> ChatKind | None:
    """Return the extension that answers a chat; None where it is the text of one model.

    Raises:
        InvalidRequestError: it is not, and no extension answers it.
    """
    others = [name for name in _OF_OTHERS if getattr(request, name) is not None]
    if card.stage is None and request.modalities is None and not others:
        return None
    kind: ChatKind
    for _, kind in parts("chat"):
        if kind.applies(request, card):
            return kind
    if set(request.modalities or ["text"]) != {"text"}:
        raise InvalidRequestError(
            f'modalities is {shown_value(request.modalities)}; allowed: ["text"]',
            param="modalities",
        )
    for name in others:
        raise InvalidRequestError(f"{name}: this server makes text alone", param=name)
    return None


def chat_model(server: Server, name: str | None) -> ServedModel:
    """Return the model that answers a chat where a client names `name`. Raises as `Server.model`.

    An adapter of one stage of a pipeline names the pipeline.
    """
    found = server.model(name, Task.GENERATE)
    if found.card.stage is not None:
        kind: ChatKind
        for _, kind in parts("chat"):
            found = kind.model(server, found)
    return found


class ChatPrompt(NamedTuple):
    """The prompt of a chat.

    Attributes:
        forms: formats of the model's output.
        use: tools of the request.
        grammar: of the request.
        max_tokens: the request's value, or None.
        dropped: messages that were left out of it.
    """

    renderer: Renderer
    forms: ModelFormats
    use: ToolUse
    grammar: Grammar | None
    prompt: Prompt
    max_tokens: int | None
    dropped: int


class PreparedChat(NamedTuple):
    """A chat that is ready for generation.

    Attributes:
        use: tools of the request.
        dropped: messages that were left out of its prompt.
    """

    renderer: Renderer
    generation: Generation
    use: ToolUse
    dropped: int


async def chat_prompt(
    call: Call,
    incoming: ParsedRequest[Any],
    request: ChatRequest,
    model: ServedModel,
    messages: MessageReader,
    kept: msgspec.Struct,
) -> ChatPrompt:
    """Check a chat and make its prompt.

    Args:
        call: the HTTP request.
        incoming: the parsed request.
        request: the request as a chat.
        model: that it asks.
        messages: makes the messages; those of `request` are dropped once the prompt is made.
        kept: the client's request; all of it but the messages lives as long as the answer.

    Raises:
        InlayError: the request is not valid.
    """
    server = call.server
    check_request(call, request)
    await server.run_prepared(call.memory.json, _check_chat, request, server.settings.max_choices)
    card = model.card
    grammar, use = None, NO_TOOLS
    if request.response_format is not None or request.structured_outputs is not None:
        grammar = await server.run_prepared(call.memory.json, grammar_of, request, card)
    renderer = await server.renderers.of(card)
    forms = ModelFormats.of(server.settings, renderer)
    if request.tools is not None or request.tool_choice is not None:
        use = await server.run_prepared(
            call.memory.json,
            ToolUse.of,
            request.tools,
            request.tool_choice,
            request.parallel_tool_calls,
        )
        check_tool_use(server.settings, card, forms, use)
    embeddings, size = None, incoming.size
    if incoming.sources or incoming.parts:
        embeddings = await embeddings_of(call, incoming, card)
        size += embeddings.num_fetched_bytes
    max_tokens = (
        request.max_tokens
        if request.max_completion_tokens is None
        else request.max_completion_tokens
    )
    cut = None
    if request.truncate_prompt_tokens is not None:
        cut = Truncation.of(
            request.truncate_prompt_tokens,
            request.truncation_side or "left",
            model.max_len,
            max_tokens,
        )
    prompt, kept_bytes, dropped = await server.run_prepared(
        size,
        _prompt,
        request,
        messages,
        embeddings,
        card,
        renderer,
        kept,
        cut,
        model.max_len - (1 if max_tokens is None else max_tokens),
    )
    del embeddings, messages
    if dropped:
        call.added.append((DROPPED_HEADER, str(dropped).encode()))
    call.memory.settle([prompt], kept_bytes)
    return ChatPrompt(renderer, forms, use, grammar, prompt, max_tokens, dropped)


async def prepare_chat(
    call: Call,
    incoming: ParsedRequest[Any],
    request: ChatRequest,
    model: ServedModel,
    response_id: str,
    messages: MessageReader,
    kept: msgspec.Struct,
) -> PreparedChat:
    """Check a chat and make its prompt and engine requests; used by every API with chats.

    Arguments and errors as `chat_prompt`; `model` is of `chat_model`, and from `response_id` the
    ids of engine requests are made. Models before it have written when this returns.

    Raises `ClientGone` as `RequestScope`.
    """
    if request.hidden_states or request.return_hidden_states:
        # Checked before anything is made for it.
        StatesPlan.of(call, request, model.card)
    before = None
    if model.card.stage is not None and (kind := kind_of(request, model.card)) is not None:
        before = await kind.upstream(
            call, incoming, request, model.card, response_id, messages, _prepare
        )
    if before is None:
        return await _prepare(call, incoming, request, model, response_id, messages, kept)
    del incoming
    asked = await _prepare(
        call, before.incoming, request, model, response_id, before.messages, kept
    )
    asked.generation.add_usage(before.name, before.usages)
    asked.generation.bypass_queue = True
    return asked


async def _prepare(
    call: Call,
    incoming: ParsedRequest[Any],
    request: ChatRequest,
    model: ServedModel,
    response_id: str,
    messages: MessageReader,
    kept: msgspec.Struct,
) -> PreparedChat:
    try:
        asked = await chat_prompt(call, incoming, request, model, messages, kept)
        renderer, prompt, max_tokens = asked.renderer, asked.prompt, asked.max_tokens
        output, bound = output_format_for(
            asked.forms,
            renderer,
            prompt,
            asked.use,
            asked.grammar,
            continued=request.messages if request.continue_final_message else None,
        )
        sampling = sampling_of(
            request,
            model,
            renderer,
            [prompt],
            max_tokens=max_tokens,
            logprobs=(request.top_logprobs or 0) if request.logprobs else None,
            logprobs_param="top_logprobs",
            grammar=bound,
            reasoning=output.reasoning,
            settings=call.server.settings,
        )
        request.messages = []
        generation = generation_of(
            call, request, response_id, model, renderer, [prompt], sampling, output=output
        )
    except InvalidRequestError as error:
        raise in_own_names(error, own_fields(request)) from None
    return PreparedChat(renderer, generation, asked.use, asked.dropped)


def _prompt(
    request: ChatRequest,
    read: MessageReader,
    embeddings: Embeddings | None,
    card: ModelCard,
    renderer: Renderer,
    kept: msgspec.Struct,
    cut: Truncation | None,
    room: int,
) -> tuple[Prompt, int, int]:
    """Return a chat's prompt, truncated, the bytes of `kept`, and messages that are left out.

    `room` is of a prompt, where turns may be left out for it.
    """
    if embeddings is None:
        chat = read(_unnamed, _unnamed)
    else:
        chat = read(embeddings.one, embeddings.in_chat)
    continues = bool(request.continue_final_message)
    effort = _effort(request, renderer)

    def rendered(chat: ReadMessages, keep: int | None, side: Side = "left") -> Prompt:
        return renderer.chat(
            chat.messages,
            rows=chat.rows,
            media=chat.media_for(card),
            tools=request.tools,
            add_generation_prompt=not continues
            if request.add_generation_prompt is None
            else request.add_generation_prompt,
            continue_final_message=continues,
            template_kwargs={**effort, **(request.chat_template_kwargs or {})},
            keep=keep,
            side=side,
        )

    whole = len(chat.messages)
    if chat.sheds and room > 0:
        chat = shortened(chat, lambda some: len(rendered(some, room + 1)) <= room)
    prompt = rendered(chat, None) if cut is None else rendered(chat, cut.keep, cut.side)
    if not len(prompt):
        raise InvalidRequestError(
            "messages: the chat template writes nothing for them; a prompt must have at least one "
            "position",
            param="messages",
        )
    if cut is not None:
        prompt = cut.cut(prompt)
    return prompt, size_of(kept, "messages"), whole - len(chat.messages)


def _unnamed(source: object) -> NoReturn:
    raise AssertionError(f"a source that the request was not found to have: {source}")


def _effort(request: ChatRequest, renderer: Renderer) -> dict[str, object]:
    """Return the template variables for `reasoning_effort`; none where the template reads none.

    Agents send an effort to every model. One whose reasoning has no setting answers as it always
    does.
    """
    effort = request.reasoning_effort
    if effort is None:
        return {}
    read = renderer.template_variables(tools=bool(request.tools))
    known: dict[str, object] = {"reasoning_effort": effort} if "reasoning_effort" in read else {}
    # Models whose reasoning can only be switched on and off.
    return known | {
        name: effort != "none" for name in ("enable_thinking", "thinking") if name in read
    }


def _check_chat(request: ChatRequest, max_choices: int) -> None:
    if (request.n or 1) > max_choices:
        raise InvalidRequestError(
            f"the request asks for {request.n} choices; at most {max_choices} are allowed "
            "(--max-choices)",
            param="n",
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError(
            "top_logprobs is only allowed when logprobs is true", param="top_logprobs"
        )
    if request.echo:
        raise InvalidRequestError(
            "echo is not supported in chat completions: the last message is the client's own",
            param="echo",
        )
    check_depths(request, "messages", "tools", "tool_choice", "chat_template_kwargs")
