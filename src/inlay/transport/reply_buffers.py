"""Memory that one end of a connection lends the other before it is answered.

Neighbours (`inlay.transport.local.same_host`) write large messages into each other's memory. One
that knows how long an answer can be says with the question where it belongs: it is then made there,
and a small message says so.
"""

from collections.abc import Sequence
from weakref import WeakValueDictionary

import msgspec
import numpy as np

from inlay.messages.prompt import Buffer
from inlay.transport.buffer_offers import BufferPlace, ReplyBuffer
from inlay.transport.local.same_host import NOTHING_SHARED, SharedMemory
from inlay.transport.memory import ReceiveMemory


class Placed(msgspec.Struct, frozen=True, array_like=True):
    """A message of which buffers are where they belong.

    Attributes:
        header: of the message.
        parts: its buffers in order: their bytes, or where they are.
    """

    header: bytes
    parts: tuple[bytes | BufferPlace, ...]


_encode = msgspec.msgpack.Encoder().encode
_decode = msgspec.msgpack.Decoder(Placed).decode


class ReplyBuffers:
    """Memory that one end of a connection has lent, and that it was lent."""

    def __init__(self, shared: SharedMemory, memory: ReceiveMemory) -> None:
        self._shared = shared
        self._memory = memory
        self._lent: WeakValueDictionary[int, ReplyBuffer] = WeakValueDictionary()

    def reserve_reply(self, num_bytes: int) -> ReplyBuffer | None:
        """Return memory that the other end may write to; None where there is none."""
        ours = self._shared.ours
        view = None if ours is None else self._memory.take(num_bytes, ours.reserve)
        offset = None if ours is None or view is None else ours.offset(view)
        if view is None or offset is None:
            return None
        lent = self._lent[offset] = ReplyBuffer(BufferPlace(offset, num_bytes), view)
        return lent

    def reply_memory(self, place: BufferPlace) -> memoryview:
        """Return memory that the other end has lent. Raises `ValueError` beyond its memory."""
        theirs, stop = self._shared.theirs, place.offset + place.size
        if not 0 <= place.offset <= stop <= len(theirs):
            raise ValueError(
                f"bytes {place.offset} to {stop} are lent of a memory of {len(theirs)}"
            )
        return theirs[place.offset : stop]

    def placed(self, header: bytes, buffers: Sequence[Buffer], limit: int) -> bytes | None:
        """Return a message as a `Placed`; None where no buffer is in borrowed memory.

        Also where the others have more bytes than `limit` together.
        """
        theirs = self._shared.theirs
        if not theirs or not any(buffer.view.obj is theirs.obj for buffer in buffers):
            return None
        start = _address(theirs)
        parts = [
            BufferPlace(_address(buffer.view) - start, len(buffer))
            if buffer.view.obj is theirs.obj
            else bytes(buffer.view)
            for buffer in buffers
        ]
        body = _encode(Placed(header, tuple(parts)))
        return body if len(body) <= limit else None

    def take(self, body: bytes) -> tuple[bytes, list[Buffer]]:
        """Return header and buffers of a `Placed`.

        Raises:
            ValueError: nothing is lent there.
            msgspec.MsgspecError: it is none.
        """
        message = _decode(body)
        return message.header, [
            Buffer(self._written(part) if isinstance(part, BufferPlace) else part)
            for part in message.parts
        ]

    def _written(self, place: BufferPlace) -> memoryview:
        lent = self._lent.get(place.offset)
        if lent is None or not 0 <= place.size <= lent.place.size:
            raise ValueError(f"{place.size} bytes are said to be at {place.offset}, not lent there")
        return lent.view[: place.size]

    def close(self) -> None:
        """Let go of what is shared: the connection has ended."""
        self._shared = NOTHING_SHARED


def _address(view: memoryview) -> int:
    return int(np.frombuffer(view, np.uint8).ctypes.data)
