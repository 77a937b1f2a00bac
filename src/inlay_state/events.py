"""Events of a background response: JSON by number, which stay as they are once they are published.

A response may be made a second time, when its frontend is lost or its worker fails. Its text is the
same, but it may come in other pieces: what has been published is taken from it, and what follows
gets the next numbers.
"""

from collections.abc import AsyncIterator
from typing import Any, Final

import msgspec

TERMINAL: Final = frozenset(
    {"response.completed", "response.incomplete", "response.failed", "error"}
)
_decode = msgspec.json.Decoder(dict[str, Any]).decode
_encode = msgspec.json.Encoder().encode


class DiffersError(Exception):
    """A response that was made again is not as it was."""


class EventLog:
    """Events so far.

    Args:
        lines: those that are published.

    Attributes:
        lines: JSON of each event; its number is its index.
        published: number of lines that readers may have seen.
    """

    def __init__(self, lines: list[bytes]) -> None:
        self.lines = lines
        self.published = len(lines)
        self._until = len(lines)
        self._at = 0
        self._text = ""

    def again(self) -> None:
        """Begin again: what comes now was taken before."""
        self._until, self._at, self._text = len(self.lines), 0, ""

    def take(self, event: dict[str, Any]) -> None:
        """Take the next event. Raises `DiffersError`."""
        if self._at < self._until:
            rest = self._matched(event)
            if rest is None:
                return
            event = rest
        self.lines.append(_encode({**event, "sequence_number": len(self.lines)}))

    def _matched(self, event: dict[str, Any]) -> dict[str, Any] | None:
        """Match an event with what was taken before; return what goes beyond it."""
        delta = event.get("delta")
        if not isinstance(delta, str):
            if self._text or self._wanted()["type"] != event["type"]:
                raise DiffersError
            self._at += 1
            return None
        self._text += delta
        while self._text and self._at < self._until:
            wanted = self._wanted()
            if not all(wanted.get(name) == event.get(name) for name in ("type", "item_id")):
                raise DiffersError
            whole: str = wanted["delta"]
            if not self._text.startswith(whole):
                if whole.startswith(self._text):
                    return None
                raise DiffersError
            self._text = self._text[len(whole) :]
            self._at += 1
        rest, self._text = self._text, ""
        return {**event, "delta": rest} if rest else None

    def _wanted(self) -> dict[str, Any]:
        return _decode(self.lines[self._at])


def lines_of(body: bytes) -> list[bytes]:
    """Return the events of a content."""
    return body.splitlines()


async def lines_in(pieces: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """Yield the events of a content that comes in pieces, which may be cut anywhere."""
    rest = b""
    async for piece in pieces:
        *lines, rest = (rest + piece).split(b"\n")
        for line in lines:
            yield line


def framed(line: bytes) -> bytes:
    """Return an event as it is sent."""
    kind: str = _decode(line)["type"]
    return b"event: %b\ndata: %b\n\n" % (kind.encode(), line)
