"""A stream of server-sent events, written as raw ASGI messages."""

import uuid
from collections.abc import Callable, Sequence
from typing import NamedTuple, TypeAlias

import msgspec

from inlay.http.asgi import Send
from inlay.http.bodies.connection import Exchange, TextWriter

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode

Event: TypeAlias = msgspec.Struct | bytes
"""An event to be encoded, or one that is."""


def data_event(event: msgspec.Struct) -> bytes:
    """Return an event without a name."""
    return b"data: %b\n\n" % _encode(event)


def named_event(event: msgspec.Struct) -> bytes:
    """Return an event that is named by its type, the struct's tag."""
    return b"event: %b\n" % str(event.__struct_config__.tag).encode() + data_event(event)


class TextEvents:
    """Encoded events that differ in one text.

    Making an event's structs and encoding them costs several times what encoding its text does.
    """

    __slots__ = ("_after", "_before")

    def __init__(
        self,
        make: Callable[[str], msgspec.Struct],
        frame: Callable[[msgspec.Struct], bytes] = data_event,
    ) -> None:
        # No client can have put it anywhere else into the event.
        mark = uuid.uuid4().hex
        self._before, _, self._after = frame(make(mark)).partition(_encode(mark))

    def event(self, text: str) -> bytes:
        return self._before + _encode(text) + self._after

    def writer(self, exchange: Exchange) -> TextWriter:
        """Return what writes such events on a connection."""
        return exchange.text_writer(self._before, self._after, _encode)


class EventFraming(NamedTuple):
    """Encoding of an API's events.

    Attributes:
        event: encodes one event.
        end: bytes after the last event.
    """

    event: Callable[[msgspec.Struct], bytes]
    end: bytes


UNNAMED = EventFraming(data_event, b"data: [DONE]\n\n")
"""Framing of completions and chat completions."""

NAMED = EventFraming(named_event, b"")
"""Framing of responses and messages: the type of an event is its name; the last ends the stream."""


class EventStream:
    """Stream of events to one client; the response starts with the first write.

    Attributes:
        started: True after the first write; from then on an error can only be an event.
    """

    __slots__ = ("_exchange", "_framing", "_send", "started")

    def __init__(
        self,
        send: Send,
        framing: EventFraming = UNNAMED,
        exchange: Exchange | None = None,
    ) -> None:
        """Nothing is written yet. `exchange`: on whose connection events are written at once."""
        self._send = send
        self._framing = framing
        self._exchange = exchange
        self.started = False

    def ready(self) -> bool:
        """Return True if `write_now` would write."""
        return self.started and self._exchange is not None and self._exchange.writable()

    def text_writer(self, events: TextEvents) -> TextWriter | None:
        """Return what writes such events once the stream has started; None where it cannot."""
        exchange = self._exchange
        if exchange is None or not self.started:
            return None
        return events.writer(exchange)

    def write_now(self, events: Sequence[Event]) -> bool:
        """Write further events to the connection at once; False where that takes `write`."""
        if self._exchange is None or not self.started:
            return False
        return not events or self._exchange.write_chunk(self._encoded(events))

    def _encoded(self, events: Sequence[Event]) -> bytes:
        frame = self._framing.event
        return b"".join([event if isinstance(event, bytes) else frame(event) for event in events])

    async def write(self, events: Sequence[Event], *, more: bool = True) -> None:
        """Send events, all in one write; the last ones without `more`."""
        if more and self.write_now(events):
            return
        data = self._encoded(events)
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if not more:
            data += self._framing.end
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def finish(self, events: Sequence[Event]) -> None:
        """Send the last events and end the stream."""
        await self.write(events, more=False)
