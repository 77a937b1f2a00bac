"""JSON of a response, whole or as events."""

import itertools
import time
from collections.abc import Sequence
from typing import Any

import msgspec

from inlay.api.generation.choices import ChoicePiece, ChoiceState
from inlay.api.generation.generation import Generation, Pieces
from inlay.api.generation.respond import stages_of
from inlay.api.openai.chat.shape import token_logprobs
from inlay.api.openai.responses.items import Items
from inlay.api.openai.schema.chat import TokenLogprob
from inlay.api.openai.schema.responses import (
    FailureDetails,
    IncompleteDetails,
    InputTokensDetails,
    OutputTokensDetails,
    Response,
    ResponsesUsage,
)
from inlay.api.openai.schema.responses_events import (
    Completed,
    Created,
    ErrorEvent,
    Failed,
    Incomplete,
    InProgress,
    ResponseEvent,
)
from inlay.base.errors import InlayError
from inlay.http.errors import shown
from inlay.render import ReasoningPiece, Renderer

FAILURE_CODES = {400: "invalid_prompt", 429: "rate_limit_exceeded"}
"""OpenAI's codes for responses that failed, by status; all others are "server_error"."""


class ResponsesShape:
    """One response in OpenAI's form.

    Args:
        opening: the response before its first output.
        generation: a generation of one choice.
        renderer: of the model.
        top_logprobs: alternatives for each token, or None for no logprobs.
        shows_reasoning: True if reasoning is an item.
    """

    def __init__(
        self,
        opening: Response,
        generation: Generation,
        renderer: Renderer,
        top_logprobs: int | None,
        *,
        shows_reasoning: bool = True,
    ) -> None:
        self._opening = opening
        self._generation = generation
        self._choice: ChoiceState = generation.choices[0]
        self._renderer = renderer
        self._top_logprobs = top_logprobs
        self._shows_reasoning = shows_reasoning
        self._numbers = itertools.count()
        self._items = Items(self._next, opening.id)
        self._begun = False
        self._seen = 0
        self._waiting: list[TokenLogprob] = []
        self._closing: Sequence[msgspec.Struct] | None = None
        self._final: Response | None = None

    def _next(self) -> int:
        return next(self._numbers)

    def events(self, pieces: Pieces) -> list[msgspec.Struct]:
        """Return the events of pieces; the first call also returns those of the start."""
        events = [] if self._begun else self._opening_events()
        self._begun = True
        for _, piece in pieces:
            events += self._take(piece)
        return list[msgspec.Struct](events)

    def texts(self, choice: ChoiceState) -> None:
        """Return None: each event has a number of its own."""

    def _opening_events(self) -> list[ResponseEvent]:
        return [
            Created(sequence_number=self._next(), response=self._opening),
            InProgress(sequence_number=self._next(), response=self._opening),
        ]

    def _take(self, piece: ChoicePiece) -> list[ResponseEvent]:
        self._wait(piece)
        shown = [
            delta
            for delta in piece.output
            if self._shows_reasoning or not isinstance(delta, ReasoningPiece)
        ]
        events = self._items.take(shown, self._waiting)
        if events:
            self._waiting = []
        return events

    def _wait(self, piece: ChoicePiece) -> None:
        """Store the logprobs of a piece until their text comes; reasoning tokens are left out."""
        if self._top_logprobs is None:
            return
        entries = token_logprobs(piece, self._renderer, self._top_logprobs)
        thought = max(0, piece.reasoning_tokens - self._seen)
        self._seen += len(entries)
        self._waiting += entries[thought:]

    def closing_events(self) -> Sequence[msgspec.Struct]:
        """Return the events of the last item's end and of the whole response."""
        if self._closing is None:
            cut = self._cut_short
            events = self._items.finish("incomplete" if cut else "completed")
            kind: Any = Incomplete if cut else Completed
            last = kind(sequence_number=self._next(), response=self._whole())
            self._closing = [*events, last]
        return self._closing

    def failure_events(self, error: InlayError) -> list[msgspec.Struct]:
        """Return the output so far, followed by the error.

        `error` comes last, because clients raise it when they read it.
        """
        body = shown(error)
        failed = msgspec.structs.replace(
            self._opening,
            status="failed",
            error=FailureDetails(FAILURE_CODES.get(error.status, "server_error"), body.message),
            output=self._items.so_far(),
            usage=self._usage(),
        )
        return [
            Failed(sequence_number=self._next(), response=failed),
            ErrorEvent(
                sequence_number=self._next(),
                error=body,
                code=body.code,
                message=body.message,
                param=body.param,
            ),
        ]

    def response(self) -> Response:
        """Return the whole response."""
        if self._final is None:
            if not self._begun:
                for piece in self._choice.pieces:
                    self._take(piece)
            self.closing_events()
        return self._whole()

    @property
    def _cut_short(self) -> bool:
        return self._choice.finish_reason == "length"

    def _whole(self) -> Response:
        if self._final is not None:
            return self._final
        cut = self._cut_short
        self._final = msgspec.structs.replace(
            self._opening,
            status="incomplete" if cut else "completed",
            completed_at=None if cut else int(time.time()),
            incomplete_details=IncompleteDetails("max_output_tokens") if cut else None,
            output=self._items.so_far(),
            usage=self._usage(),
            hidden_states=self._choice.hidden_states,
        )
        return self._final

    def _usage(self) -> ResponsesUsage:
        usage = self._generation.usage()
        return ResponsesUsage(
            input_tokens=usage.prompt_tokens,
            input_tokens_details=InputTokensDetails(usage.cached_tokens),
            output_tokens=usage.completion_tokens,
            output_tokens_details=OutputTokensDetails(self._choice.reasoning_tokens),
            total_tokens=usage.prompt_tokens + usage.completion_tokens,
            stages=stages_of(self._generation.usage_by_model()),
        )
