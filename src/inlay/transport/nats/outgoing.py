"""A stream at its worker: what has not been acknowledged is kept, so that it can be sent again."""

from collections import deque

import msgspec

from inlay.outputs import split
from inlay.request import Output

WINDOW_PIECES = 128
WINDOW_BYTES = 128 * 1024
"""Sent and not acknowledged, at most: what a client who does not read makes a frontend keep.

The rest stays here, in bytes.
"""

_encode = msgspec.msgpack.Encoder().encode


class Outgoing:
    """The pieces of one stream.

    Attributes:
        number: of the stream.
        sent: pieces sent, those that may be sent again left out.
        ended: the last piece is among them.
    """

    def __init__(self, number: int, piece_limit: int) -> None:
        """Nothing has been said.

        Args:
            number: of the stream.
            piece_limit: bytes of a piece at most; larger ones are cut.
        """
        self.number = number
        self._limit = piece_limit
        self._pieces: deque[bytes] = deque()
        self._made = 0
        self._acknowledged = 0
        self._unacknowledged_bytes = 0
        self.sent = 0
        self.ended = False

    def add(self, output: Output) -> None:
        """Take what the engine says."""
        piece = _encode((self.number, self._made, msgspec.structs.replace(output, request_id="")))
        if len(piece) > self._limit:
            cut = split(output)
            if cut is not None:
                self.add(cut[0])
                self.add(cut[1])
                return
        self._pieces.append(piece)
        self._made += 1
        self.ended = self.ended or output.finish_reason is not None

    def take(self) -> list[msgspec.Raw]:
        """The pieces that are to be sent now."""
        taken = []
        while self.sent < self._made and (
            self.sent == self._acknowledged
            or (
                self.sent - self._acknowledged < WINDOW_PIECES
                and self._unacknowledged_bytes < WINDOW_BYTES
            )
        ):
            piece = self._pieces[self.sent - self._acknowledged]
            self._unacknowledged_bytes += len(piece)
            self.sent += 1
            taken.append(msgspec.Raw(piece))
        return taken

    def acknowledge(self, pieces: int) -> None:
        """So many pieces need not be kept."""
        for _ in range(self._acknowledged, min(pieces, self.sent)):
            self._unacknowledged_bytes -= len(self._pieces.popleft())
            self._acknowledged += 1

    def rewind(self, start: int) -> None:
        """Send from piece `start` on again, or from the first that is kept."""
        start = max(start, self._acknowledged)
        for index in range(start, self.sent):
            self._unacknowledged_bytes -= len(self._pieces[index - self._acknowledged])
        self.sent = min(self.sent, start)

    @property
    def done(self) -> bool:
        """Whether nothing of it is needed any more."""
        return self.ended and not self._pieces
