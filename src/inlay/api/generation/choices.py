"""State of one choice: from the outputs of its engine request to text.

Finds stop strings and drops the tokens after them.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from msgspec import UNSET

from inlay.api.schema.hidden_states import ShownStates
from inlay.base.errors import EngineError, InlayError, OverloadedError
from inlay.messages.request import Output, Payload, Request, TokenLogprobs
from inlay.render import (
    PLAIN,
    Begins,
    ContentDelta,
    Detokenizer,
    OutputDelta,
    OutputFormat,
    ReasoningIds,
    Renderer,
    StopMatcher,
    StopStrings,
    ToolCallDelta,
)
from inlay.render.output import ContentParser


@dataclass(frozen=True, slots=True)
class DisplayOptions:
    """Options of a request for the text of its output."""

    stops: StopStrings | None = None
    include_stop: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    format: OutputFormat = PLAIN


class ChoicePiece(NamedTuple):
    """Addition of some outputs to a choice.

    Attributes:
        text: text as the model wrote it.
        output: `text` parsed by the request's format; may lag behind it.
        logprobs: one entry for each of `token_ids`, if requested.
        completion_tokens: tokens of the choice so far.
        reasoning_tokens: those of them that are reasoning.
    """

    text: str
    output: tuple[OutputDelta, ...]
    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...]
    finish_reason: str | None
    stop_reason: int | str | None
    completion_tokens: int
    reasoning_tokens: int


def joined(pieces: list[ChoicePiece]) -> ChoicePiece:
    """Return a choice's pieces as one piece."""
    return ChoicePiece(
        "".join(piece.text for piece in pieces),
        tuple(delta for piece in pieces for delta in piece.output),
        tuple(id_ for piece in pieces for id_ in piece.token_ids),
        tuple(entry for piece in pieces for entry in piece.logprobs),
        pieces[-1].finish_reason,
        pieces[-1].stop_reason,
        pieces[-1].completion_tokens,
        pieces[-1].reasoning_tokens,
    )


class _ReasoningCount:
    """Counter of reasoning tokens: all tokens before the answer, tags included."""

    __slots__ = ("_ids", "_inside", "_renderer", "_waiting", "tokens")

    def __init__(self, ids: ReasoningIds, renderer: Renderer) -> None:
        self._ids = ids
        self._renderer = renderer
        self._inside = ids.begins is Begins.INSIDE
        self._waiting: int | None = 0 if ids.begins is Begins.OPEN else None
        self.tokens = 0

    def take(self, ids: Sequence[int]) -> None:
        """Count the next `ids`."""
        for id_ in ids:
            if self._waiting is not None:
                self._wait(id_, self._waiting)
            elif self._inside:
                self.tokens += 1
                self._inside = id_ != self._ids.end

    def _wait(self, id_: int, waited: int) -> None:
        """Take a token after `waited` tokens of whitespace at the start of the output."""
        if id_ == self._ids.start:
            self._inside, self._waiting, self.tokens = True, None, waited + 1
        else:
            self._waiting = None if self._renderer.token_text(id_).strip() else waited + 1


class ChoiceState:
    """Output of one engine request so far.

    Attributes:
        index: index of the choice in the response.
        request: the engine request.
        completion_tokens: tokens shown; those after a stop string are not counted.
        cached_tokens: prompt tokens found in the prefix cache, as the engine reported.
        queued_seconds: seconds until its first step, as the engine reported; 0 if it did not.
        calls_tools: True if it has called a tool.
        finish_reason: the reason, once it has ended.
        pieces: those that a whole response is made of.
        payloads: what came beside text.
        hidden_states: as the answer has them, once the choice has ended.
        worker: id of the worker that made the last of it; None before the first.
    """

    __slots__ = (
        "_detokenizer", "_include_stop", "_min_tokens", "_parser", "_reasoning",
        "_stops", "cached_tokens", "calls_tools", "completion_tokens", "finish_reason",
        "hidden_states", "index", "payloads", "pieces", "queued_seconds", "request", "worker",
    )  # fmt: skip

    def __init__(
        self, index: int, request: Request, renderer: Renderer, display: DisplayOptions
    ) -> None:
        self.index = index
        self.request = request
        self.worker: str | None = None
        self.completion_tokens = 0
        self.cached_tokens = 0
        self.queued_seconds = 0.0
        self.calls_tools = False
        self.finish_reason: str | None = None
        self.pieces: list[ChoicePiece] = []
        self.payloads: list[Payload] = []
        self.hidden_states: ShownStates = UNSET
        self._detokenizer: Detokenizer = renderer.detokenizer(
            skip_special_tokens=display.skip_special_tokens,
            spaces_between_special_tokens=display.spaces_between_special_tokens,
            keep=display.format.special_tokens,
        )
        make = display.format.parser
        self._parser = None if make is ContentParser else make()
        ids = display.format.reasoning
        self._reasoning = None if ids is None else _ReasoningCount(ids, renderer)
        self._stops = (
            StopMatcher(display.stops, include=display.include_stop) if display.stops else None
        )
        self._include_stop = display.include_stop
        self._min_tokens = request.sampling.min_tokens

    def take(self, deltas: Sequence[Output]) -> ChoicePiece:
        """Take outputs and return their piece. Must not be called once `finish_reason` is set.

        Raises:
            InlayError: the request failed.
        """
        if len(deltas) == 1 and self._stops is None and deltas[0].only_tokens:
            # The usual case of a stream.
            return self._further(deltas[0])
        text = ""
        output: list[OutputDelta] = []
        ids: tuple[int, ...] = ()
        logprobs: tuple[TokenLogprobs, ...] = ()
        stop_reason: int | str | None = None
        for delta in deltas:
            if delta.error is not None or delta.finish_reason in ("error", "abort"):
                raise _failure(delta)
            if delta.usage is not None:
                self.cached_tokens = delta.usage.cached_tokens
                self.queued_seconds = delta.usage.queued_seconds
            self.payloads += delta.payloads
            shown, count, stop = self._show(delta)
            ids += delta.token_ids[:count]
            logprobs += delta.logprobs[:count]
            self.completion_tokens += count
            if stop is None and delta.finish_reason is not None:
                rest, stop = self._flush()
                shown += rest
                self.finish_reason = delta.finish_reason
                stop_reason = self._ended_by(delta)
            if stop is not None:
                self.finish_reason, stop_reason = "stop", stop
            text += shown
            output += self._read(shown, delta.token_ids[:count])
            if stop is not None:
                break
        return self._piece(text, output, ids, logprobs, stop_reason)

    def _piece(
        self,
        text: str,
        output: Sequence[OutputDelta],
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        stop_reason: int | str | None = None,
    ) -> ChoicePiece:
        return ChoicePiece(
            text,
            tuple(output),
            ids,
            logprobs,
            self.finish_reason,
            stop_reason,
            self.completion_tokens,
            self.reasoning_tokens,
        )

    @property
    def is_plain(self) -> bool:
        """True if all text is content."""
        return self._reasoning is None and self._parser is None

    def further(self, delta: Output) -> str | ChoicePiece:
        """Take an output that has nothing but ids, for plain choices alone.

        Returns:
            Its text, or the last piece if it has a stop string.
        """
        ids = delta.token_ids
        if self._stops is None:
            self.completion_tokens += len(ids)
            return self._detokenizer.push(ids)
        text, count, stop = self._show(delta)
        self.completion_tokens += count
        if stop is None:
            return text
        self.finish_reason = "stop"
        return self._piece(text, self._read(text, ids[:count]), ids[:count], (), stop)

    def _further(self, delta: Output) -> ChoicePiece:
        """Take an output that has nothing but ids, where no stop string is looked for."""
        ids = delta.token_ids
        self.completion_tokens += len(ids)
        text = self._detokenizer.push(ids) if ids else ""
        return self._piece(text, self._read(text, ids), ids, delta.logprobs)

    def _read(self, text: str, ids: Sequence[int]) -> list[OutputDelta]:
        """Parse the text of further tokens."""
        output: list[OutputDelta]
        if self._parser is None:
            output = [ContentDelta(text)] if text else []
        else:
            output = self._parser.push(text)
            if self.finish_reason is not None:
                output += self._parser.flush()
            if not self.calls_tools:
                self.calls_tools = any(isinstance(delta, ToolCallDelta) for delta in output)
        if self._reasoning is not None:
            self._reasoning.take(ids)
        return output

    @property
    def counts_reasoning(self) -> bool:
        """True if reasoning tokens can be counted."""
        return self._reasoning is not None

    @property
    def reasoning_tokens(self) -> int:
        """Tokens before the answer, tags included; 0 if they cannot be counted."""
        return 0 if self._reasoning is None else self._reasoning.tokens

    def _ended_by(self, delta: Output) -> int | None:
        if (
            delta.stop_token_id is not None
            and delta.stop_token_id in self.request.sampling.stop_token_ids
        ):
            return delta.stop_token_id
        return None

    def _show(self, delta: Output) -> tuple[str, int, str | None]:
        """Return (text, tokens taken, stop string) of an output's ids.

        The id that ended the output has no text.
        """
        ids = delta.token_ids
        visible = ids if delta.stop_token_id is None or self._include_stop else ids[:-1]
        if self._stops is None:
            return (self._detokenizer.push(visible) if visible else ""), len(ids), None
        text = ""
        for taken, id_ in enumerate(visible, 1):
            new = self._detokenizer.push((id_,))
            if self.completion_tokens + taken < self._min_tokens:
                text += new
                continue
            shown, stop = self._stops.push(new)
            text += shown
            if stop is not None:
                return text, taken, stop
        return text, len(ids), None

    def _flush(self) -> tuple[str, str | None]:
        """Return (text that was held back, stop string in it) at the end of the output."""
        rest = self._detokenizer.flush()
        if self._stops is None:
            return rest, None
        shown, stop = self._stops.push(rest)
        return shown + ("" if stop is not None else self._stops.flush()), stop


def _failure(delta: Output) -> InlayError:
    if delta.error is not None:
        return delta.error.to_error()
    if delta.finish_reason == "abort":
        return OverloadedError("the worker aborted the request", retry_after=1.0)
    return EngineError("the engine failed without a reason")
