"""JSON of a message, whole or as events."""

from collections.abc import Iterable
from itertools import groupby

import msgspec

from inlay.api.anthropic.errors import failure
from inlay.api.anthropic.schema import (
    Block,
    BlockDelta,
    BlockStart,
    BlockStop,
    Delta,
    Ending,
    InputDelta,
    Message,
    MessageDelta,
    MessageStart,
    MessageStop,
    OutputTokensDetails,
    Ping,
    TextBlock,
    TextDelta,
    ThinkingBlock,
    ThinkingDelta,
    ToolUseBlock,
    Usage,
)
from inlay.api.generation.choices import ChoiceState, joined
from inlay.api.generation.generation import Generation, Pieces
from inlay.api.generation.respond import stages_of
from inlay.base.errors import InlayError
from inlay.http.sse import Event, TextEvents, named_event
from inlay.render import ContentDelta, OutputDelta, ParsedOutput, ReasoningPiece
from inlay.render.arguments import read_arguments


class MessagesShape:
    """One message in Anthropic's form.

    Args:
        response_id: id of the message.
        model: name that it shows.
        generation: a generation of one choice.
        request_id: of the HTTP request, for errors.
        shows_thinking: True if reasoning is a block.
    """

    def __init__(
        self,
        response_id: str,
        model: str,
        generation: Generation,
        request_id: str,
        *,
        shows_thinking: bool,
    ) -> None:
        self._id = response_id
        self._model = model
        self._generation = generation
        self._choice: ChoiceState = generation.choices[0]
        self._request_id = request_id
        self._shows_thinking = shows_thinking
        self._begun = False
        self._index = -1
        self._open: str | int | None = None
        self._texts: TextEvents | None = None
        self._stop: int | str | None = None

    def events(self, pieces: Pieces) -> list[Event]:
        """Return the events of pieces; the first call also returns those of the start."""
        events: list[Event] = []
        if not self._begun:
            self._begun = True
            opening = Message(id=self._id, model=self._model, usage=self._usage())
            events += [MessageStart(opening), Ping()]
        for _, piece in pieces:
            self._stop = piece.stop_reason
            for delta in self._shown(piece.output):
                events += self._take(delta)
        return events

    def texts(self, choice: ChoiceState) -> TextEvents | None:
        """Return the events of further text in the block that is open, if it is one of text."""
        return self._texts

    def closing_events(self) -> list[Event]:
        """Return the events of the last block's end and of the message's."""
        # Clients read the first block; an answer without a word is an empty text.
        empty = [] if self._index >= 0 else self._take(ContentDelta(""))
        return [*empty, *self._close(), MessageDelta(self._ending(), self._usage()), MessageStop()]

    def failure_events(self, error: InlayError) -> list[Event]:
        return [failure(error, self._request_id)]

    def response(self) -> msgspec.Struct:
        """Return the whole message."""
        piece = joined(self._choice.pieces)
        self._stop = piece.stop_reason
        ending = self._ending()
        blocks = [_block(list(group)) for _, group in groupby(self._shown(piece.output), _place)]
        return Message(
            id=self._id,
            model=self._model,
            content=blocks or [TextBlock("")],
            stop_reason=ending.stop_reason,
            stop_sequence=ending.stop_sequence,
            usage=self._usage(),
        )

    def _shown(self, output: Iterable[OutputDelta]) -> Iterable[OutputDelta]:
        return (
            delta
            for delta in output
            if self._shows_thinking or not isinstance(delta, ReasoningPiece)
        )

    def _take(self, delta: OutputDelta) -> list[Event]:
        events: list[Event] = []
        place = _place(delta)
        if place != self._open:
            events += self._close()
            self._open = place
            self._index += 1
            events.append(BlockStart(self._index, _empty(delta)))
        if isinstance(delta, ContentDelta):
            if self._texts is None:
                index = self._index
                self._texts = TextEvents(
                    lambda mark: BlockDelta(index, TextDelta(mark)), named_event
                )
            return [*events, self._texts.event(delta.text)]
        added = _addition(delta)
        return events if added is None else [*events, BlockDelta(self._index, added)]

    def _close(self) -> list[Event]:
        if self._open is None:
            return []
        self._open = self._texts = None
        return [BlockStop(self._index)]

    def _ending(self) -> Ending:
        if self._choice.finish_reason == "length":
            return Ending("max_tokens", None)
        if isinstance(self._stop, str):
            return Ending("stop_sequence", self._stop)
        return Ending("tool_use" if self._choice.calls_tools else "end_turn", None)

    def _usage(self) -> Usage:
        usage = self._generation.usage()
        thought = usage.reasoning_tokens
        return Usage(
            input_tokens=usage.prompt_tokens - usage.cached_tokens,
            cache_read_input_tokens=usage.cached_tokens,
            output_tokens=usage.completion_tokens,
            output_tokens_details=msgspec.UNSET
            if thought is None
            else OutputTokensDetails(thought),
            stages=stages_of(self._generation.usage_by_model()),
        )


def _place(delta: OutputDelta) -> str | int:
    """Return what the deltas of one block have in common: a kind, or the index of a call."""
    if isinstance(delta, ContentDelta):
        return "text"
    return "thinking" if isinstance(delta, ReasoningPiece) else delta.index


def _empty(delta: OutputDelta) -> Block:
    """Return the block that begins with `delta`, before it."""
    if isinstance(delta, ContentDelta):
        return TextBlock("")
    if isinstance(delta, ReasoningPiece):
        return ThinkingBlock("")
    return ToolUseBlock(delta.id or "", delta.name or "", {})


def _addition(delta: OutputDelta) -> Delta | None:
    """Return the addition of `delta` to its block, if there is any."""
    if isinstance(delta, ContentDelta):
        return TextDelta(delta.text)
    if isinstance(delta, ReasoningPiece):
        return ThinkingDelta(delta.text)
    return InputDelta(delta.arguments) if delta.arguments else None


def _block(deltas: list[OutputDelta]) -> Block:
    """Return the block of deltas at one place."""
    output = ParsedOutput.of(deltas)
    if output.tool_calls:
        call = output.tool_calls[0]
        return ToolUseBlock(call.id or "", call.name or "", read_arguments(call.arguments))
    if output.reasoning:
        return ThinkingBlock(output.reasoning)
    return TextBlock(output.content)
