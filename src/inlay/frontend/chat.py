"""`POST /v1/chat/completions`."""

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeAlias

import msgspec

from inlay.errors import InlayError, InvalidRequestError
from inlay.frontend.admission import bytes_alive
from inlay.frontend.choices import Choice, Piece
from inlay.frontend.completions import joined, prompt_ids
from inlay.frontend.embeds import Embeddings
from inlay.frontend.errors import shown
from inlay.frontend.generation import Generation, Pieces
from inlay.frontend.incoming import Incoming, read_request
from inlay.frontend.messages import check_depth, with_rows
from inlay.frontend.references import embeddings_of
from inlay.frontend.respond import generation_of, respond
from inlay.frontend.sampling import check_request, sampling_of
from inlay.frontend.server import Call
from inlay.frontend.sources import Source, in_messages
from inlay.prompt import Prompt, Rows
from inlay.protocol.openai.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    ChatRequest,
    TokenLogprob,
    TopLogprob,
)
from inlay.protocol.openai.generation import ErrorResponse
from inlay.protocol.work import ModelCard, Sampling
from inlay.render import Output, Renderer

ReadMessages: TypeAlias = Callable[[Callable[[Source], Rows]], tuple[list[dict[str, Any]], list[Rows]]]
"""From what reads a source to the messages for the renderer and their rows, as `with_rows` returns them."""

_decoder = msgspec.json.Decoder(ChatRequest)


class Asked(NamedTuple):
    """A chat that is ready to be generated.

    Attributes:
        sampling: what the choices share.
    """

    card: ModelCard
    renderer: Renderer
    sampling: Sampling
    generation: Generation


async def chat_completions(call: Call) -> None:
    """Answer one chat request."""
    embeds = call.server.embeds
    incoming = await read_request(call, _decoder, lambda request: embeds.in_messages(request.messages))
    request = incoming.parsed.request
    response_id = f"chatcmpl-{uuid.uuid4().hex}"
    card, renderer, _, generation = await ask(
        call,
        incoming,
        request,
        response_id,
        in_messages(request.messages),
        lambda read: with_rows(request.messages, read),
    )
    del incoming
    shape = ChatShape(response_id, request, card.name, renderer, generation)
    await respond(call, request, card, generation, shape)


async def ask(
    call: Call,
    incoming: Incoming[Any],
    request: ChatRequest,
    response_id: str,
    sources: Sequence[Source],
    messages: ReadMessages,
) -> Asked:
    """Everything between a chat that was asked and its first token, whatever API it came by.

    Args:
        call: whose.
        incoming: the request as it came.
        request: the request as a chat.
        response_id: names its works.
        sources: where it says that rows come from.
        messages: of the chat.

    Raises:
        InlayError: what is wrong with the request.
    """
    server = call.server
    check_request(request)
    _check_chat(request, server.settings.max_choices)
    card = server.card(request.model)
    renderer = await server.renderers.of(card)
    embeddings = await embeddings_of(call, incoming, sources, card)
    prompt = await server.prepare(incoming.size, _prompt, request, messages, embeddings, renderer)
    del embeddings
    call.reservation.shrink_to(bytes_alive([prompt]))
    max_tokens = (
        request.max_tokens if request.max_completion_tokens is None else request.max_completion_tokens
    )
    sampling = sampling_of(
        request,
        card,
        longest=len(prompt),
        max_tokens=max_tokens,
        logprobs=(request.top_logprobs or 0) if request.logprobs else None,
        logprobs_param="top_logprobs",
    )
    generation = generation_of(call, request, response_id, card, renderer, [prompt], sampling, max_tokens)
    return Asked(card, renderer, sampling, generation)


def _prompt(
    request: ChatRequest,
    read_messages: ReadMessages,
    embeddings: Embeddings,
    renderer: Renderer,
) -> Prompt:
    messages, rows = read_messages(embeddings.one)
    continues = bool(request.continue_final_message)
    return renderer.chat(
        messages,
        rows=rows,
        tools=request.tools,
        add_generation_prompt=not continues
        if request.add_generation_prompt is None
        else request.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=request.chat_template_kwargs or {},
    )


def _check_chat(request: ChatRequest, max_choices: int) -> None:
    if (request.n or 1) > max_choices:
        raise InvalidRequestError(
            f"the request asks for {request.n} choices; at most {max_choices} are allowed", param="n"
        )
    if request.top_logprobs is not None and not request.logprobs:
        raise InvalidRequestError("top_logprobs is only allowed when logprobs is true", param="top_logprobs")
    if request.prompt_logprobs is not None:
        raise InvalidRequestError(
            "prompt_logprobs is not supported in chat completions", param="prompt_logprobs"
        )
    if request.echo:
        raise InvalidRequestError("echo is not supported in chat completions", param="echo")
    if request.tool_choice not in (None, "none", "auto"):
        raise InvalidRequestError(
            f"tool_choice must be 'none' or 'auto', got {_name(request.tool_choice)}", param="tool_choice"
        )
    for name in ("messages", "tools", "chat_template_kwargs"):
        check_depth(getattr(request, name), name)


def _name(choice: object) -> str:
    return repr(choice[:40]) if isinstance(choice, str) else "an object that names a tool"


class ChatShape:
    """Chat completions as OpenAI shows them, with vLLM's `stop_reason` and `token_ids`."""

    def __init__(
        self, response_id: str, request: ChatRequest, model: str, renderer: Renderer, generation: Generation
    ) -> None:
        self._id = response_id
        self._request = request
        self._model = model
        self._renderer = renderer
        self._generation = generation
        self._created = int(time.time())
        options = request.stream_options
        self._continuous = bool(options and options.continuous_usage_stats)
        self._begun: set[int] = set()
        self._collected: dict[int, list[Piece]] = {}

    def _chunk(self, choices: list[ChatChunkChoice], **more: Any) -> ChatChunk:
        return ChatChunk(id=self._id, created=self._created, model=self._model, choices=choices, **more)

    def events(self, pieces: Pieces) -> list[msgspec.Struct]:
        """One event for each piece, and before a choice's first one another with the role."""
        events: list[msgspec.Struct] = []
        usage = self._generation.usage() if self._continuous else msgspec.UNSET
        with_ids = bool(self._request.return_token_ids)
        for choice, piece in pieces:
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                role = ChatChunkChoice(choice.index, ChatDelta("assistant", ""))
                ids = prompt_ids(choice.work.prompt) if with_ids else msgspec.UNSET
                events.append(self._chunk([role], prompt_token_ids=ids, usage=usage))
            output = Output.of(piece.output)
            if output.content or piece.finish_reason is not None or piece.logprobs or with_ids:
                shown = ChatChunkChoice(
                    choice.index,
                    ChatDelta(content=output.content) if output.content else ChatDelta(),
                    self._logprobs(piece),
                    piece.finish_reason,
                    piece.stop_reason if piece.finish_reason is not None else msgspec.UNSET,
                    list(piece.token_ids) if with_ids else msgspec.UNSET,
                )
                events.append(self._chunk([shown], usage=usage))
        return events

    def closing_events(self) -> list[msgspec.Struct]:
        """One event without choices, only usage, where that was asked for."""
        options = self._request.stream_options
        if options is None or not options.include_usage:
            return []
        return [self._chunk([], usage=self._generation.usage())]

    def failure_events(self, error: InlayError) -> list[msgspec.Struct]:
        """The error."""
        return [ErrorResponse(shown(error))]

    def collect(self, pieces: Pieces) -> None:
        """Keep the pieces by choice."""
        for choice, piece in pieces:
            self._collected.setdefault(choice.index, []).append(piece)

    def response(self) -> msgspec.Struct:
        """All choices, whole."""
        with_ids = bool(self._request.return_token_ids)
        first = self._generation.choices[0].work.prompt
        return ChatCompletion(
            id=self._id,
            created=self._created,
            model=self._model,
            choices=[self._choice(choice, with_ids) for choice in self._generation.choices],
            usage=self._generation.usage(),
            prompt_token_ids=prompt_ids(first) if with_ids else msgspec.UNSET,
        )

    def _choice(self, choice: Choice, with_ids: bool) -> ChatChoice:
        piece = joined(self._collected[choice.index])
        return ChatChoice(
            index=choice.index,
            message=ChatMessage(Output.of(piece.output).content),
            logprobs=self._logprobs(piece),
            finish_reason=piece.finish_reason,
            stop_reason=piece.stop_reason,
            token_ids=list(piece.token_ids) if with_ids else msgspec.UNSET,
        )

    def _logprobs(self, piece: Piece) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        return ChatLogprobs(token_logprobs(piece, self._renderer, self._request.top_logprobs or 0))


def token_logprobs(piece: Piece, renderer: Renderer, top: int) -> list[TokenLogprob]:
    """The logprobs of a piece, with `top` alternatives a token."""
    text, data = renderer.token_text, renderer.token_bytes
    return [
        TokenLogprob(
            text(id_),
            entry.logprob,
            data(id_),
            [TopLogprob(text(other), logprob, data(other)) for other, logprob in entry.top[:top]],
        )
        for id_, entry in zip(piece.token_ids, piece.logprobs, strict=True)
    ]
