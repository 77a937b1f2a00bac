"""Frames of a connection: small messages whole, large ones as chunks between them.

No input or output.

A frame is a head (kind, number, length; little endian) and its body. A message is a msgpack header
and the raw buffers it names (`inlay.transport.frames`). Up to `CHUNK_BYTES` it is one frame. A
larger one is offered first: the receiver grants it when it has memory, names the buffers that it
already has, and then gets the others in chunks. So one large message delays a small one by at most
a chunk. It is sent unasked where the receiver has given credit for it (`inlay.transport.credit`)
and cannot have its buffers. Where the sender can write to the receiver's memory
(`inlay.transport.local.same_host`), the grant says where the parts belong, and instead of a chunk
comes word that it is written there. What is made in lent memory (`reply_buffers`) is one frame too.
"""

import struct
from collections import OrderedDict, deque
from collections.abc import Callable, Container, Iterable, Iterator, Mapping, Sequence
from enum import IntEnum
from types import MappingProxyType
from typing import TypeAlias

from inlay.messages.prompt import Buffer
from inlay.transport import frames
from inlay.transport.buffer_offers import (
    BufferLocations,
    BufferNames,
    BufferOffer,
    decode_offer,
    decode_places,
    decode_present,
    encode,
)
from inlay.transport.events import Credited, Event, Offered, Returned, WireMessage, Withdrawn
from inlay.transport.parts import Incoming, Outgoing
from inlay.transport.reply_buffers import ReplyBuffers

CHUNK_BYTES = 128 * 1024
"""Bytes of the largest message that is sent in one frame; a chunk has four times as many."""
WRITTEN_BYTES = 1 << 20
"""Bytes that are written into the other end's memory at a time."""
MAX_PARTS = 8192
"""Buffers of a message, at most."""
MAX_MESSAGE_BYTES = 1 << 30
MAX_OPEN = 256
"""Large messages that one side may offer at a time."""
_MAX_BODY = 4 * CHUNK_BYTES
_SCRATCH_BYTES = 64 * 1024

_head = struct.Struct("<BxxxII")


class FrameKind(IntEnum):
    """Kind of a frame."""

    MESSAGE = 1
    OFFER = 2
    GRANT = 3
    CHUNK = 4
    ABANDON = 5
    PING = 6
    PLACES = 7
    WRITTEN = 8
    PLACED = 9
    UNASKED = 10
    CREDIT = 11
    RETURNED = 12


Piece: TypeAlias = "bytes | memoryview"
OnGrant: TypeAlias = Callable[[int, Sequence[int], Mapping[int, int]], None]

NO_MEMORY = memoryview(b"")
_NO_OFFSETS: Mapping[int, int] = MappingProxyType({})


class FrameWriter:
    """Outgoing frames of one connection, in the order in which they should leave.

    Args:
        max_bytes: bytes of one message, at most.
        shared: memory of the other end that this one can write to; empty where there is none.
        lending: what of it was lent.
    """

    def __init__(
        self,
        max_bytes: int = MAX_MESSAGE_BYTES,
        shared: memoryview = NO_MEMORY,
        lending: ReplyBuffers | None = None,
    ) -> None:
        self._max_bytes = max_bytes
        self._lending = lending
        self._shared = shared
        self._names = BufferNames()
        self._small: deque[bytes] = deque()
        self._large: OrderedDict[int, Outgoing] = OrderedDict()
        self._held: OrderedDict[int, bytes] = OrderedDict()
        """Offers that wait until fewer than `MAX_OPEN` are open."""
        self._next_number = 0
        self._credit = 0
        """Bytes that may be sent unasked."""
        self._num_frames = 0  # That were ever queued in `_small`.
        self._returned = 0  # Number of frames up to the last `RETURNED`.
        self.queued_bytes = 0
        """Bytes of small messages that have not left."""

    def put(self, message: object) -> int | None:
        """Queue a message.

        Returns:
            The number of a large one, None of a small one.

        Raises:
            ValueError: it is larger than `max_bytes`, or has `MAX_PARTS` buffers or more.
        """
        header, buffers = frames.encode(message)
        lending = self._lending
        placed = None if lending is None else lending.placed(header, buffers, CHUNK_BYTES)
        if placed is not None:
            self._frame(FrameKind.PLACED, 0, placed)
            return None
        total = len(header) + sum(map(len, buffers))
        if total > self._max_bytes:
            raise ValueError(f"a message of {total} bytes; at most {self._max_bytes} are sent")
        if len(buffers) >= MAX_PARTS:
            raise ValueError(f"a message of {len(buffers)} buffers; at most {MAX_PARTS - 1}")
        if total <= CHUNK_BYTES:
            self._frame(FrameKind.MESSAGE, 0, frames.joined(header, buffers))
            return None
        number = self._next_number = (self._next_number + 1) & 0xFFFFFFFF
        known = any(map(self._names.is_known, buffers))
        names = ("", *map(self._names.of, buffers))
        offer = BufferOffer((len(header), *map(len, buffers)), names, True)
        outgoing = Outgoing([memoryview(header), *(each.view for each in buffers)])
        self._large[number] = outgoing
        if total <= self._credit and self._may_open() and not known:
            self._credit -= total
            self._frame(FrameKind.UNASKED, number, encode(offer))
            outgoing.granted, outgoing.after = True, self._num_frames
        else:
            self._held[number] = encode(offer)
            self._offer_held()
        return number

    def grant(
        self, number: int, present: Sequence[int], offsets: Mapping[int, int] = _NO_OFFSETS
    ) -> None:
        """Let the peer send the large message that it offered.

        Args:
            number: of the offer.
            present: parts that it need not send.
            offsets: in this end's memory, of the parts that it is to write there.
        """
        if offsets:
            places = BufferLocations(tuple(present), dict(offsets))
            self._frame(FrameKind.PLACES, number, encode(places))
        else:
            self._frame(FrameKind.GRANT, number, encode(tuple(present)))

    def credit(self, num_bytes: int) -> None:
        """Let the peer send so many bytes more unasked; 0 asks for its credit back."""
        self._frame(FrameKind.CREDIT, num_bytes, b"")

    def on_credit(self, num_bytes: int) -> None:
        """Take the peer's word that so many bytes more may be sent unasked; 0: return them.

        Raises:
            ValueError: they are asked back again before the peer can know the answer.
        """
        self._credit = self._credit + num_bytes if num_bytes else 0
        if not num_bytes:
            # Else a peer that does not read could have any number of answers wait for it.
            if self._returned > self._num_frames - len(self._small):
                raise ValueError("credit is asked back twice")
            self._frame(FrameKind.RETURNED, 0, b"")
            self._returned = self._num_frames

    def ping(self) -> None:
        """Queue a sign of life."""
        self._frame(FrameKind.PING, 0, b"")

    def withdraw(self, number: int) -> bool:
        """Stop sending a large message; False when all of it has left already."""
        if self._large.pop(number, None) is None:
            return False
        if self._held.pop(number, None) is None:
            self._frame(FrameKind.ABANDON, number, b"")
        self._offer_held()
        return True

    def when_left(self, number: int, call: Callable[[], None]) -> bool:
        """Call `call` when all of a large message has been taken; False when it has."""
        outgoing = self._large.get(number)
        if outgoing is None:
            return False
        outgoing.left = call
        return True

    def on_grant(
        self, number: int, present: Sequence[int], offsets: Mapping[int, int] = _NO_OFFSETS
    ) -> None:
        """Take the peer's word that it has memory for a large message. Raises `ValueError`."""
        outgoing = self._large.get(number)
        if outgoing is None:
            return
        for part in (*present, *offsets):
            if not 0 < part < len(outgoing.parts):
                raise ValueError(f"a grant names part {part} of {len(outgoing.parts)}")
        for part in present:
            outgoing.parts[part] = memoryview(b"")
        for part, offset in offsets.items():
            stop = offset + len(outgoing.parts[part])
            if not 0 <= offset <= stop <= len(self._shared):
                raise ValueError(
                    f"bytes {offset} to {stop} are beyond a memory of {len(self._shared)}"
                )
            outgoing.places[part] = self._shared[offset:stop]
        outgoing.granted = True

    def clear(self) -> None:
        """Forget what has not left."""
        self._small.clear()
        self._large.clear()
        self._held.clear()
        self._shared = NO_MEMORY
        self._credit = 0
        self.queued_bytes = 0

    @property
    def idle(self) -> bool:
        """Nothing waits to leave, or to be granted."""
        return not self._small and not self._large

    def take_small(self, limit: int) -> list[Piece]:
        """Return the small messages that should leave now, about `limit` bytes."""
        pieces: list[Piece] = []
        size = 0
        while self._small and size < limit:
            pieces.append(self._small.popleft())
            size += len(pieces[-1])
        self.queued_bytes -= size
        return pieces

    def take(self, limit: int) -> list[Piece]:
        """Return what should leave now, about `limit` bytes.

        Small messages, then chunks in turn, but none before the frame that says it comes unasked.
        """
        pieces = self.take_small(limit)
        if not self._large:
            return pieces
        size = sum(map(len, pieces))
        # At least one chunk each time: many small messages must not hold up a large one for ever.
        left = self._num_frames - len(self._small)
        for number in [n for n, each in self._large.items() if each.granted and each.after <= left]:
            outgoing = self._large[number]
            if written := outgoing.write(WRITTEN_BYTES):
                pieces.append(_head.pack(FrameKind.WRITTEN, number, written))
                size += written
            elif chunk := outgoing.next_chunk(4 * CHUNK_BYTES):
                pieces += (_head.pack(FrameKind.CHUNK, number, len(chunk)), chunk)
                size += len(chunk)
            if outgoing.at_end():
                del self._large[number]
                outgoing.left()
                self._offer_held()
            else:
                self._large.move_to_end(number)
            if size >= limit:
                break
        # The end of a large message may have let another one be offered.
        return pieces or self.take_small(limit)

    def _may_open(self) -> bool:
        return len(self._large) - len(self._held) < MAX_OPEN

    def _offer_held(self) -> None:
        while self._held and self._may_open():
            number, offer = self._held.popitem(last=False)
            self._frame(FrameKind.OFFER, number, offer)

    def _frame(self, kind: FrameKind, number: int, body: bytes) -> None:
        self._small.append(_head.pack(kind, number, len(body)) + body)
        self.queued_bytes += _head.size + len(body)
        self._num_frames += 1


class FrameReader:
    """Incoming frames of one connection: memory to read into, and the events of what was read.

    Args:
        on_grant: takes what a grant says, as `FrameWriter.on_grant`.
        max_bytes: bytes of one large message, at most.
        lending: what was lent to the other end.
    """

    def __init__(
        self, on_grant: OnGrant, max_bytes: int, lending: ReplyBuffers | None = None
    ) -> None:
        self._on_grant = on_grant
        self._lending = lending
        self._max_bytes = max_bytes
        self._scratch = bytearray(_SCRATCH_BYTES)
        self._filled = 0
        self._large: dict[int, Incoming | None] = {}
        self._number = 0
        self._left = 0
        """The message of the chunk that is being read, and the bytes of the chunk still to come."""

    def accept(
        self,
        number: int,
        parts: Sequence[Buffer | memoryview],
        names: Sequence[str],
        shared: Container[int] = (),
    ) -> WireMessage | None:
        """Say where an offered message goes: memory for each part, or the buffer that is here.

        Args:
            number: of the offer.
            parts: writable memory of each part's size, or the part itself; the header first.
            names: of the parts; empty for those without one.
            shared: numbers of the parts that the other end writes itself.

        Returns:
            The message, where nothing of it is still to come.
        """
        incoming = Incoming(parts, names, shared)
        if incoming.index == len(parts):
            del self._large[number]
            return _whole(number, incoming)
        self._large[number] = incoming
        return None

    @property
    def waiting(self) -> frozenset[int]:
        """Numbers of the offered messages that have no memory yet."""
        return frozenset(number for number, each in self._large.items() if each is None)

    @property
    def due(self) -> int:
        """Bytes still to come of the chunk that is being read."""
        return self._left

    def clear(self) -> None:
        """Forget every offered message, with the memory of what has come of it."""
        self._large.clear()

    def buffer(self) -> memoryview:
        """Return memory for the next bytes of the connection."""
        if self._left:
            incoming = self._large.get(self._number)
            if incoming is not None:
                return incoming.place(self._left)
            return memoryview(self._scratch)[: self._left]
        # While chunks come only a head is read ahead: each chunk is then read where it belongs.
        ahead = _head.size if self._large and not self._filled else len(self._scratch)
        return memoryview(self._scratch)[self._filled : ahead]

    def advance(self, count: int) -> Iterable[Event]:
        """Take `count` bytes that were read into `buffer()`.

        Raises:
            ValueError: they are no frames; the connection can carry nothing more.
            msgspec.MsgspecError: likewise.
        """
        if not self._left and not self._filled and count > _head.size:
            code, _, length = _head.unpack_from(self._scratch)
            if code == FrameKind.MESSAGE and count == _head.size + length:
                # The usual case: one small message.
                return (WireMessage(*frames.split(bytes(self._scratch[_head.size : count]))),)
        return self._advance(count)

    def _advance(self, count: int) -> Iterator[Event]:
        if self._left:
            self._left -= count
            yield from self._chunk_read(self._number, count)
            return
        self._filled += count
        view, start = memoryview(self._scratch), 0
        while not self._left and self._filled - start >= _head.size:
            code, number, length = _head.unpack_from(view, start)
            body, came = start + _head.size, min(self._filled - start - _head.size, length)
            if code == FrameKind.CHUNK:
                start = body + came
                self._number, self._left = number, length - came
                place = self._place(number, length)
                if place is not None:
                    place[:came] = view[body:start]
                    yield from self._chunk_read(number, came)
            elif code == FrameKind.WRITTEN:
                start = body
                if self._place(number, length, written=True) is not None:
                    yield from self._chunk_read(number, length)
            elif length > _MAX_BODY:
                raise ValueError(f"a frame of {length} bytes; at most {_MAX_BODY} are taken")
            elif came < length:
                break
            else:
                start = body + length
                event = self._event(code, number, bytes(view[body:start]))
                if event is not None:
                    yield event
        self._keep(start)

    def _keep(self, start: int) -> None:
        """Move what is not read yet to the front, and have room for the frame that it begins."""
        rest = bytes(memoryview(self._scratch)[start : self._filled])
        self._filled = len(rest)
        needed = _SCRATCH_BYTES
        if len(rest) >= _head.size:
            needed = max(needed, _head.size + _head.unpack_from(rest)[2])
        if needed != len(self._scratch):
            self._scratch = bytearray(needed)
        self._scratch[: len(rest)] = rest

    def _place(self, number: int, length: int, *, written: bool = False) -> memoryview | None:
        if number not in self._large:
            return None
        incoming = self._large[number]
        if incoming is None:
            raise ValueError("a chunk came before its message was granted")
        if written and incoming.index not in incoming.shared:
            raise ValueError("bytes are said to be written where they are to be sent")
        return incoming.place(length)

    def _chunk_read(self, number: int, count: int) -> Iterator[Event]:
        incoming = self._large.get(number)
        if incoming is not None and incoming.advance(count):
            del self._large[number]
            yield _whole(number, incoming)

    def _event(self, code: int, number: int, body: bytes) -> Event | None:
        match code:
            case FrameKind.MESSAGE:
                return WireMessage(*frames.split(body))
            case FrameKind.OFFER | FrameKind.UNASKED:
                return self._offered(number, body, code == FrameKind.UNASKED)
            case FrameKind.GRANT:
                self._on_grant(number, decode_present(body), _NO_OFFSETS)
            case FrameKind.PLACES:
                places = decode_places(body)
                self._on_grant(number, places.present, places.offsets)
            case FrameKind.ABANDON:
                if self._large.pop(number, self) is not self:
                    return Withdrawn(number)
            case FrameKind.PLACED if self._lending is not None:
                return WireMessage(*self._lending.take(body))
            case FrameKind.CREDIT:
                return Credited(number)
            case FrameKind.RETURNED:
                return Returned()
            case _ if code != FrameKind.PING:
                raise ValueError(f"a frame of kind {code}")
        return None

    def _offered(self, number: int, body: bytes, unasked: bool) -> Offered:
        offer = decode_offer(body)
        sizes = offer.sizes
        if len(offer.names) != len(sizes):
            raise ValueError(f"{len(offer.names)} names of {len(sizes)} parts")
        if not 1 <= len(sizes) <= MAX_PARTS or min(sizes) < 0 or sum(sizes) > self._max_bytes:
            raise ValueError(
                f"a message of {sum(sizes)} bytes in {len(sizes)} parts; at most "
                f"{self._max_bytes} in {MAX_PARTS} are taken"
            )
        if number in self._large or len(self._large) >= MAX_OPEN:
            raise ValueError(f"{len(self._large)} large messages at a time; at most {MAX_OPEN}")
        self._large[number] = None
        return Offered(number, offer, unasked)


def _whole(number: int, incoming: Incoming) -> WireMessage:
    header, *buffers = incoming.buffers()
    return WireMessage(header.view, buffers, number)
