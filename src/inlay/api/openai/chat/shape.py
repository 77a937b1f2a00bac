"""JSON of chat completions, whole or as events."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from inlay.api.generation.choices import ChoicePiece, ChoiceState, joined
from inlay.api.generation.generation import Generation, Pieces
from inlay.api.generation.logprobs import LEAST, token_names
from inlay.api.generation.tools import ToolChoice, ToolUse
from inlay.api.openai.chunks import (
    Chunks,
    fingerprint_of,
    metrics_of,
    weight_versions_of,
    whole_usage,
)
from inlay.api.openai.completions.shape import prompt_ids
from inlay.api.openai.schema.chat import (
    ChatChoice,
    ChatChunk,
    ChatChunkChoice,
    ChatCompletion,
    ChatDelta,
    ChatLogprobs,
    ChatMessage,
    FunctionCall,
    FunctionCallDelta,
    TokenLogprob,
    ToolCall,
    ToolCallPiece,
    TopLogprob,
)
from inlay.api.openai.schema.generation import WeightVersion
from inlay.api.schema.chat import ChatRequest
from inlay.http.sse import Event, TextEvents
from inlay.render import ContentDelta, ParsedOutput, Renderer, ToolCallDelta

_UNSET = msgspec.UNSET


def _content(index: int, text: str) -> ChatChunkChoice:
    return ChatChunkChoice(index, ChatDelta(content=text), token_ids=None)


class _AnswerFields(NamedTuple):
    """Fields of a message or delta; UNSET where the output has no such part."""

    content: str | msgspec.UnsetType
    reasoning: str | msgspec.UnsetType
    tool_calls: list[ToolCallDelta]


_NOTHING = _AnswerFields(_UNSET, _UNSET, [])


class ChatShape:
    """Chat completions in vLLM 0.32's form.

    Fields of a whole answer without a value are null.

    Args:
        response_id: of the response.
        request: what was asked.
        model: name the response shows.
        renderer: of the model.
        generation: what is answered.
        use: of tools.
        stage: name of the workers where the model is one of a pipeline's, or None.
    """

    def __init__(
        self,
        response_id: str,
        request: ChatRequest,
        model: str,
        renderer: Renderer,
        generation: Generation,
        use: ToolUse,
        stage: str | None = None,
    ) -> None:
        marks = {}
        if request.modalities is not None:
            marks = {"modality": "text"} | ({} if stage is None else {"stage": stage})
        self._id = response_id
        self._request = request
        self._model = model
        self._renderer = renderer
        self._generation = generation
        self._named = use.choice is ToolChoice.NAMED
        self._chunks = Chunks(ChatChunk, response_id, model, request, generation, marks)
        self.failure_events = self._chunks.failure_events
        self._more_than_text = (
            bool(request.return_token_ids)
            or self._chunks.usage.continuous
            or bool(request.logprobs)
        )
        self._begun: set[int] = set()

    def events(self, pieces: Pieces) -> list[Event]:
        """Return an event for each piece, preceded by one with the role at a choice's start."""
        events: list[Event] = []
        chunks, with_ids = self._chunks, bool(self._request.return_token_ids)
        for choice, piece in pieces:
            if choice.index not in self._begun:
                self._begun.add(choice.index)
                role = ChatChunkChoice(choice.index, ChatDelta(role="assistant", content=""))
                ids = prompt_ids(choice.request.prompt) if with_ids else None
                usage = chunks.usage_of(choice, None)
                events.append(
                    chunks.chunk([role], prompt_token_ids=ids, prompt_text=None, usage=usage)
                )
            ends = piece.finish_reason is not None
            texts = None if ends or len(piece.output) != 1 else self.texts(choice)
            if texts is not None:
                (only,) = piece.output
                if isinstance(only, ContentDelta):
                    events.append(texts.event(only.text))
                    continue
            delta = self._delta(piece)
            # Clients expect the finish reason of a call in an event after its last piece.
            apart = ends and delta is not None and bool(delta.tool_calls)
            if delta is not None or ends or piece.logprobs or with_ids:
                shown = ChatChunkChoice(
                    choice.index,
                    delta or ChatDelta(),
                    self._logprobs(piece),
                    token_ids=list(piece.token_ids) if with_ids else None,
                )
                events.append(self._piece(choice, piece, shown, last=ends and not apart))
            if apart:
                end = ChatChunkChoice(choice.index, ChatDelta(), token_ids=None)
                events.append(self._piece(choice, piece, end, last=True))
        return events

    def texts(self, choice: ChoiceState) -> TextEvents | None:
        """Return the events of a choice's pieces that have nothing but text, if they are such."""
        if self._more_than_text or choice.index not in self._begun:
            return None
        return self._chunks.texts(choice.index, _content)

    def closing_events(self) -> list[Event]:
        """Return those of hidden states, and of usage."""
        states = [
            ChatChunkChoice(choice.index, ChatDelta(hidden_states=choice.hidden_states))
            for choice in self._generation.choices
            if choice.hidden_states is not _UNSET
        ]
        return [*(self._chunks.chunk([each]) for each in states), *self._chunks.closing_events()]

    @property
    def choices(self) -> Sequence[ChoiceState]:
        """The choices of the response."""
        return self._generation.choices

    @property
    def created(self) -> int:
        """Unix time of the response."""
        return self._chunks.created

    def chunk(self, choice: ChatChunkChoice, **more: Any) -> ChatChunk:
        """Return a chunk of one choice with further fields."""
        return self._chunks.chunk([choice], **more)

    def _piece(
        self, choice: ChoiceState, piece: ChoicePiece, shown: ChatChunkChoice, *, last: bool
    ) -> ChatChunk:
        usage = self._chunks.usage_of(choice, piece)
        if not last:
            return self._chunks.chunk([shown], usage=usage)
        ended = msgspec.structs.replace(
            shown,
            finish_reason=self._finish_reason(choice, piece),
            stop_reason=piece.stop_reason,
            weight_versions=self._weight_versions(choice),
        )
        return self._chunks.chunk([ended], last=True, usage=usage)

    def response(self) -> ChatCompletion:
        """Return the whole response."""
        with_ids = bool(self._request.return_token_ids)
        first = self._generation.choices[0].request.prompt
        scores = self._generation.scores_of(self._generation.choices[0])
        return ChatCompletion(
            id=self._id,
            created=self._chunks.created,
            model=self._model,
            choices=[self._choice(choice, with_ids) for choice in self._generation.choices],
            usage=whole_usage(self._generation),
            system_fingerprint=fingerprint_of(self._generation),
            metrics=metrics_of(self._generation),
            prompt_logprobs=None
            if scores is None
            else scores.shown(self._renderer, int(self._request.prompt_logprobs or 0)),
            prompt_token_ids=prompt_ids(first) if with_ids else None,
            service_tier="flex" if self._request.service_tier == "flex" else None,
        )

    def _said(self, piece: ChoicePiece) -> _AnswerFields:
        output = ParsedOutput.of(piece.output)
        reasoning = output.reasoning if self._request.include_reasoning is not False else ""
        return _AnswerFields(output.content or _UNSET, reasoning or _UNSET, output.tool_calls)

    def _delta(self, piece: ChoicePiece) -> ChatDelta | None:
        """Return the delta of a piece, or None if it is empty."""
        said = self._said(piece) if piece.output else _NOTHING
        if said == _NOTHING:
            return None
        calls = [
            ToolCallPiece(
                call.index,
                call.id or _UNSET,
                "function" if call.id else _UNSET,
                FunctionCallDelta(call.name or _UNSET, call.arguments),
            )
            for call in said.tool_calls
        ]
        return ChatDelta(
            content=said.content,
            tool_calls=calls or _UNSET,
            reasoning=said.reasoning,
            reasoning_content=said.reasoning,
        )

    def _message(self, piece: ChoicePiece) -> ChatMessage:
        said = self._said(piece)
        calls = [
            ToolCall(call.id or "", FunctionCall(call.name or "", call.arguments))
            for call in said.tool_calls
        ]
        other = calls or said.reasoning is not _UNSET
        return ChatMessage(
            content=said.content or (None if other else ""),
            tool_calls=calls or _UNSET,
            reasoning=said.reasoning or None,
            reasoning_content=said.reasoning,
        )

    def _finish_reason(self, choice: ChoiceState, piece: ChoicePiece) -> str | None:
        """Return OpenAI's reason: `tool_calls` for the model's calls, `stop` for a named call."""
        if piece.finish_reason == "stop" and choice.calls_tools and not self._named:
            return "tool_calls"
        return piece.finish_reason

    def _choice(self, choice: ChoiceState, with_ids: bool) -> ChatChoice:
        piece = joined(choice.pieces)
        return ChatChoice(
            index=choice.index,
            message=self._message(piece),
            logprobs=self._logprobs(piece),
            finish_reason=self._finish_reason(choice, piece),
            stop_reason=piece.stop_reason,
            token_ids=list(piece.token_ids) if with_ids else None,
            hidden_states=choice.hidden_states,
            weight_versions=self._weight_versions(choice),
        )

    def _weight_versions(self, choice: ChoiceState) -> list[WeightVersion] | msgspec.UnsetType:
        return weight_versions_of(self._request, self._generation, choice.completion_tokens)

    def _logprobs(self, piece: ChoicePiece) -> ChatLogprobs | None:
        if not self._request.logprobs:
            return None
        request = self._request
        top = None if request.logprob_token_ids else request.top_logprobs or 0
        return ChatLogprobs(
            token_logprobs(piece, self._renderer, top, token_names(request, self._renderer))
        )


def token_logprobs(
    piece: ChoicePiece,
    renderer: Renderer,
    top: int | None,
    name: Callable[[int], str] | None = None,
) -> list[TokenLogprob]:
    """Return the logprobs of a piece.

    Args:
        piece: a piece with logprobs.
        renderer: of the model.
        top: alternatives for each token; None for the chosen token and all that have logprobs.
        name: names tokens; by their text if None.
    """
    name, data = name or renderer.token_text, renderer.token_bytes
    shown: list[TokenLogprob] = []
    for id_, entry in zip(piece.token_ids, piece.logprobs, strict=True):
        near = entry.top[:top]
        if top is None:
            near = ((id_, entry.logprob), *(one for one in entry.top if one[0] != id_))
        others = [
            TopLogprob(name(other), max(logprob, LEAST), data(other)) for other, logprob in near
        ]
        shown.append(TokenLogprob(name(id_), max(entry.logprob, LEAST), data(id_), others))
    return shown
