"""A stream of server-sent events, written as raw ASGI messages."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from inlay.api.openai.responses_events import ResponseEvent
from inlay.frontend.bodies.body import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


def _data(event: msgspec.Struct) -> bytes:
    return b"data: %b\n\n" % _encode(event)


def _named(event: msgspec.Struct) -> bytes:
    named = b"event: %b\n" % event.name.encode() if isinstance(event, ResponseEvent) else b""
    return named + _data(event)


class Framing(NamedTuple):
    """Encoding of an API's events.

    Attributes:
        event: encodes one event.
        end: bytes after the last event.
    """

    event: Callable[[msgspec.Struct], bytes]
    end: bytes


UNNAMED = Framing(_data, b"data: [DONE]\n\n")
"""Framing of completions and chat completions."""

NAMED = Framing(_named, b"")
"""Framing of responses: the event's type is also its name, and the last event ends the stream."""


class EventStream:
    """Stream of events to one client; the response starts with the first write.

    Attributes:
        started: True after the first write; from then on an error can only be an event.
    """

    __slots__ = ("_framing", "_send", "started")

    def __init__(self, send: Send, framing: Framing = UNNAMED) -> None:
        self._send = send
        self._framing = framing
        self.started = False

    async def write(self, events: Iterable[msgspec.Struct]) -> None:
        """Send events, all in one write."""
        await self._write(self._framed(events), more=True)

    async def finish(self, events: Iterable[msgspec.Struct]) -> None:
        """Send the last events and end the stream."""
        await self._write(self._framed(events) + self._framing.end, more=False)

    def _framed(self, events: Iterable[msgspec.Struct]) -> bytes:
        return b"".join(map(self._framing.event, events))

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
