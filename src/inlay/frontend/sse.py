"""A stream of server-sent events, written as raw ASGI messages."""

from collections.abc import Iterable

import msgspec

from inlay.errors import InlayError
from inlay.frontend.body import Send
from inlay.frontend.errors import error_json

_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]
_DONE = b"data: [DONE]\n\n"
_encode = msgspec.json.Encoder().encode


class EventStream:
    """Events to one client; the response starts with the first write.

    Attributes:
        started: whether anything has been written, after which an error can only be an event.
    """

    __slots__ = ("_send", "started")

    def __init__(self, send: Send) -> None:
        self._send = send
        self.started = False

    async def write(self, events: Iterable[msgspec.Struct]) -> None:
        """Send events, all in one write."""
        await self._write(b"".join([b"data: %b\n\n" % _encode(event) for event in events]), more=True)

    async def done(self) -> None:
        """End the stream."""
        await self._write(_DONE, more=False)

    async def fail(self, error: InlayError) -> None:
        """End the stream with an error event."""
        await self._write(b"data: %b\n\n" % error_json(error) + _DONE, more=False)

    async def _write(self, data: bytes, *, more: bool) -> None:
        if not self.started:
            self.started = True
            await self._send({"type": "http.response.start", "status": 200, "headers": _HEADERS})
        await self._send({"type": "http.response.body", "body": data, "more_body": more})
