"""Messages over a stream socket, with large buffers beside it in shared memory.

A frame is a fixed head, a table of its buffers, the msgpack header, then the buffers that travel
inline. A buffer of at least `SHARED_FROM` bytes goes into the arena when there is room, and only
its place travels.
"""

import asyncio
import socket
import struct
from collections.abc import Callable
from typing import Any, Generic, NoReturn, TypeVar

import msgspec

from inlay.messages.prompt import Buffer
from inlay.transport import frames
from inlay.transport.local.arena import Arena

SHARED_FROM = 64 * 1024
MAX_HEADER = 256 * 1024 * 1024

_head = struct.Struct("<II")
_place = struct.Struct("<?QQ")

T = TypeVar("T")


class LocalTransport(Generic[T]):
    """One end of a connection between two processes that trust each other.

    Not safe for concurrent receivers; `send` never blocks and frames leave in order.
    """

    def __init__(
        self,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
        arena: Arena,
        hears: Any,
        *,
        sends_shared: bool,
    ) -> None:
        self._decoder = frames.Decoder[T](hears)
        self._reader = reader
        self._writer = writer
        self.arena = arena
        self._sends_shared = sends_shared

    @classmethod
    async def open(
        cls, sock: socket.socket, arena: Arena, hears: Any, *, sends_shared: bool
    ) -> "LocalTransport[T]":
        """A channel over a connected socket.

        Args:
            sock: connected.
            arena: shared with the other end.
            hears: the type, or union of types, of the messages that will come.
            sends_shared: set on the end that created the arena.
        """
        reader, writer = await asyncio.open_unix_connection(sock=sock)
        return cls(reader, writer, arena, hears, sends_shared=sends_shared)

    def send(self, message: object) -> list[int]:
        """Send `message`; the arena offsets it occupies until the caller releases them."""
        header, buffers = frames.encode(message)
        offsets: list[int] = []
        table = bytearray()
        inline: list[Buffer] = []
        for buffer in buffers:
            offset = (
                self.arena.put(buffer)
                if self._sends_shared and len(buffer) >= SHARED_FROM
                else None
            )
            if offset is None:
                inline.append(buffer)
                table += _place.pack(False, 0, len(buffer))
            else:
                offsets.append(offset)
                table += _place.pack(True, offset, len(buffer))
        self._writer.write(b"".join((_head.pack(len(header), len(buffers)), table, header)))
        for buffer in inline:
            self._writer.write(buffer.view)
        return offsets

    def release(self, offsets: list[int]) -> None:
        """Free what a message occupies, as the other end reads it no more."""
        for offset in offsets:
            self.arena.free(offset)

    def withdraw(self, offsets: list[int]) -> bool:
        """Do nothing: a message leaves when it is sent."""
        return False

    def when_left(self, offsets: list[int], call: Callable[[], None]) -> bool:
        """Do nothing: messages come in the order in which they are sent."""
        return False

    @property
    def unsent_bytes(self) -> int:
        """Bytes of messages that wait to leave."""
        return self._writer.transport.get_write_buffer_size()

    def room(self, num_bytes: int) -> memoryview | None:
        """Return memory of which a buffer in a message is not copied; None where there is none."""
        return self.arena.reserve(num_bytes)

    def reserve_reply(self, num_bytes: int) -> None:
        """Return None: the worker of a frontend gives no answers that are so large."""

    def reply_memory(self, place: object) -> memoryview:
        """Raise `ValueError`: nothing is lent."""
        raise ValueError("memory is said to be lent, and cannot be")

    async def receive(self) -> T:
        """The next message.

        Raises:
            EOFError: the other end is gone.
            msgspec.DecodeError: what came is no message this end hears.
        """
        try:
            header_size, count = _head.unpack(await self._reader.readexactly(_head.size))
            if header_size > MAX_HEADER:
                raise msgspec.DecodeError(
                    f"a header of {header_size} bytes; at most {MAX_HEADER} are taken"
                )
            table = await self._reader.readexactly(count * _place.size) if count else b""
            header = await self._reader.readexactly(header_size)
            buffers = []
            for shared, offset, length in _place.iter_unpack(table):
                if shared:
                    buffers.append(self.arena.read(offset, length))
                else:
                    buffers.append(Buffer(await self._reader.readexactly(length)))
        except (asyncio.IncompleteReadError, ConnectionError) as error:
            raise EOFError("the other end of the channel is gone") from error
        if not buffers:
            return self._decoder.decode_header(header)
        return self._decoder.decode(header, buffers)

    async def deliver(self, take: Callable[[T], None]) -> NoReturn:
        """Have `take` called with each message; raise as `receive`, and what `take` raises."""
        while True:
            # No name holds the last message: its rows may be large.
            take(await self.receive())

    async def drain(self) -> None:
        """Wait until what was sent has left, or the other end is gone."""
        try:
            await self._writer.drain()
        except ConnectionError as error:
            raise EOFError("the other end of the channel is gone") from error

    def close(self) -> None:
        """Close the connection. What was sent still leaves."""
        self._writer.close()
