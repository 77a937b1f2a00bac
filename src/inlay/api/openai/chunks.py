"""Events of a stream of completions or chat completions: what its chunks have in common."""

import time
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec

from inlay.api.generation.choices import ChoicePiece, ChoiceState
from inlay.api.generation.generation import Generation, UsageShown
from inlay.api.openai.schema.generation import GenerationRequest, UsageInfo
from inlay.errors import InlayError
from inlay.http.errors import ErrorResponse, shown
from inlay.http.sse import Event, TextEvents

_UNSET = msgspec.UNSET

C = TypeVar("C", bound=msgspec.Struct)


class Chunks(Generic[C]):
    """Maker of the chunks of one response.

    Args:
        kind: type of a chunk.
        response_id: of the response.
        model: name the response shows.
        request: its `stream_options` say which events have usage.
        generation: what is answered.

    Attributes:
        created: Unix time of the response.
        usage: the events that have usage.
    """

    def __init__(
        self,
        kind: Callable[..., C],
        response_id: str,
        model: str,
        request: GenerationRequest,
        generation: Generation,
    ) -> None:
        self._kind = kind
        self._id = response_id
        self._model = model
        self._generation = generation
        self._texts: dict[int, TextEvents] = {}
        self.created = int(time.time())
        self.usage = UsageShown.of(request)

    def chunk(self, choices: list[Any], *, last: bool = False, **more: Any) -> C:
        """Return a chunk; that with the response's last piece has the fingerprint."""
        if last and not self.usage.at_end:
            more["system_fingerprint"] = self._generation.fingerprint
        return self._kind(
            id=self._id, created=self.created, model=self._model, choices=choices, **more
        )

    def text(self, index: int, text: str, part: Callable[[int, str], msgspec.Struct]) -> bytes:
        """Return the event of a chunk that has nothing but the text of one choice.

        Args:
            index: of the choice.
            text: further text.
            part: makes the chunk's choice of an index and a text.
        """
        events = self._texts.get(index)
        if events is None:
            events = self._texts[index] = TextEvents(lambda mark: self.chunk([part(index, mark)]))
        return events.event(text)

    def usage_of(
        self, choice: ChoiceState, piece: ChoicePiece | None
    ) -> UsageInfo | msgspec.UnsetType:
        """Return the usage in a chunk of `piece`, if each has one."""
        return self._generation.usage_of(choice, piece) if self.usage.continuous else _UNSET

    def closing_events(self) -> list[Event]:
        """Return a chunk with usage and no choices, if the request wants it."""
        if not self.usage.at_end:
            return []
        generation = self._generation
        usage, fingerprint = generation.usage_at_end(), generation.fingerprint
        return [self.chunk([], usage=usage, system_fingerprint=fingerprint)]

    def failure_events(self, error: InlayError) -> list[Event]:
        """Return the error as an event."""
        return [ErrorResponse(shown(error))]
