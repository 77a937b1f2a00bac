"""A stream of server-sent events, written as raw ASGI messages."""

from collections.abc import Callable, Iterable
from typing import NamedTuple

import msgspec

from inlay.http.asgi import Send

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_encode = msgspec.json.Encoder().encode


def data_event(event: msgspec.Struct) -> bytes:
    """Return an event without a name."""
    return b"data: %b\n\n" % _encode(event)


class Framing(NamedTuple):
    """Encoding of an API's events.

    Attributes:
        event: encodes one event.
        end: bytes after the last event.
    """

    event: Callable[[msgspec.Struct], bytes]
    end: bytes


UNNAMED = Framing(data_event, b"data: [DONE]\n\n")
"""Framing of completions and chat completions."""


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

    async def write(self, events: Iterable[msgspec.Struct], *, more: bool = True) -> None:
        """Send events, all in one write; the last ones without `more`."""
        data = b"".join(map(self._framing.event, events))
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        if not more:
            data += self._framing.end
        await self._send({"type": "http.response.body", "body": data, "more_body": more})

    async def finish(self, events: Iterable[msgspec.Struct]) -> None:
        """Send the last events and end the stream."""
        await self.write(events, more=False)
