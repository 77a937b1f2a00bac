"""One connection between two processes: messages in and out over TCP, or between neighbours.

It offers what `inlay.transport.local.channel.LocalTransport` offers, so that both ends of a plane
are the same code. Sending never blocks; a peer that does not read is cut off when too much waits
for it.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Generic, NoReturn, TypeVar, cast

import msgspec

from inlay.base import liveness
from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Buffer
from inlay.transport import frames
from inlay.transport.buffer_offers import OWN_NAME, BufferOffer, BufferPlace, ReplyBuffer
from inlay.transport.credit import Credit
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.events import Credited, Event, Offered, Returned, WireMessage, Withdrawn
from inlay.transport.handshake import Handshake, HandshakeError
from inlay.transport.local.same_host import NOTHING_SHARED, SharedMemory
from inlay.transport.memory import ReceiveMemory
from inlay.transport.reply_buffers import ReplyBuffers
from inlay.transport.stream import Reader
from inlay.transport.wire import FrameReader, FrameWriter

log = logging.getLogger(__name__)

T = TypeVar("T")

WRITE_BYTES = 512 * 1024
"""Bytes handed to the socket in a turn of the event loop, about."""
MAX_QUEUED_BYTES = 64 * 1024 * 1024
"""Bytes of small messages that may wait for a peer that does not read."""
FREED_SECONDS = 5.0
"""Seconds after a request has ended, by a lost process too, within which nothing is kept of it."""
PING_SECONDS = 1.0
SILENCE_SECONDS = FREED_SECONDS - 2 * PING_SECONDS
"""A peer from which nothing came for so long is gone, counted while this process ran itself.

Each looks once in `PING_SECONDS`, so it is found before `FREED_SECONDS`.
"""
HANDSHAKE_SECONDS = 5.0


class TcpPeer(Reader, Generic[T]):
    """One end of a connection. Its messages are received by one reader at a time.

    Args:
        handshake: proves both ends.
        hears: the type, or union of types, of the messages that will come.
        memory: for large messages.
        cache: of named buffers; those that are here are not sent again.
        check: looks at the transport first; what it raises ends the connection.
        shared: memory that both ends share, where they are neighbours.
    """

    def __init__(
        self,
        handshake: Handshake,
        hears: Any,
        memory: ReceiveMemory,
        cache: EmbedsCache | None = None,
        check: Callable[[asyncio.BaseTransport], None] = lambda transport: None,
        shared: SharedMemory = NOTHING_SHARED,
    ) -> None:
        self._check = check
        self._handshake: Handshake | None = handshake
        self._proof = b""
        self._came = bytearray()
        self._decoder = frames.Decoder[T](hears)
        self._memory = memory
        self._cache = cache or EmbedsCache(0)
        self._arriving: dict[int, tuple[Sequence[str], frozenset[int]]] = {}
        """Names of the parts of each large message on its way in, and the parts that were here."""
        self._deferred: deque[tuple[int, BufferOffer]] = deque()
        self._shared = shared
        self._lending = ReplyBuffers(shared, memory)
        self._writer = FrameWriter(shared=shared.theirs, lending=self._lending)
        self._credit = Credit(memory, self._give_credit)
        self._reader = FrameReader(self._granted, memory.limit, self._lending)
        self._withdraw: dict[int, Callable[[], None]] = {}
        self._transport: asyncio.Transport | None = None
        self._writable = False
        self._flushing = False
        self._arrived: deque[T] = deque()
        self._taker: Callable[[T], None] | None = None
        self._taker_failed: Exception | None = None
        self._changed = asyncio.Event()
        self._ended: Exception | None = None
        self._closing = False
        self._timer: asyncio.TimerHandle | None = None
        self._clock = liveness.clock()
        self._heard = self._said = 0.0
        self.ready: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    # What the owner calls.

    def send(self, message: object) -> int | None:
        """Send a message.

        Returns:
            A number by which a large one can be withdrawn, else None.

        Raises:
            InvalidRequestError: it is larger than any message may be.
        """
        if self._ended is not None or self._closing:
            return None
        try:
            number = self._writer.put(message)
        except ValueError as error:
            raise InvalidRequestError(str(error)) from error
        if self._writer.queued_bytes > MAX_QUEUED_BYTES:
            self._end(ConnectionError("the other end does not read"))
        elif not self._flushing:
            self._flush()
        return number

    def release(self, number: int | None) -> None:
        """Do nothing: a message occupies no memory that both ends share."""

    @property
    def unsent_bytes(self) -> int:
        """Bytes of messages that wait to leave, but for large ones, which give way to others."""
        return self._writer.queued_bytes

    def room(self, num_bytes: int) -> memoryview | None:
        """Return None: what is sent is read from where it is."""
        return None

    def reserve_reply(self, num_bytes: int) -> ReplyBuffer | None:
        """Return memory for an answer of a neighbour, lent while it is held; None elsewhere."""
        return self._lending.reserve_reply(num_bytes)

    def reply_memory(self, place: BufferPlace) -> memoryview:
        """Return memory that the other end has lent. Raises `ValueError` if it cannot have."""
        return self._lending.reply_memory(place)

    def withdraw(self, number: int | None) -> bool:
        """Stop sending a large message; False when it has left."""
        if number is None:
            return False
        withdrawn = self._writer.withdraw(number)
        self._flush_soon()
        return withdrawn

    def when_left(self, number: int | None, call: Callable[[], None]) -> bool:
        """Call `call` when a large message has left; False if it has, or is none."""
        return number is not None and self._writer.when_left(number, call)

    async def receive(self) -> T:
        """Return the next message.

        Raises:
            EOFError: the other end is gone, or was cut off.
        """
        while not self._arrived:
            if self._ended is not None:
                raise EOFError("the other end of the connection is gone") from self._ended
            self._changed.clear()
            await self._changed.wait()
        return self._arrived.popleft()

    async def deliver(self, take: Callable[[T], None]) -> NoReturn:
        """As `FrameTransport.deliver`: `take` is called as a message comes, not a turn later."""
        self._taker = take
        try:
            while self._arrived:
                take(self._arrived.popleft())
            while self._taker_failed is None and self._ended is None:
                self._changed.clear()
                await self._changed.wait()
        finally:
            self._taker = None
        failed, self._taker_failed = self._taker_failed, None
        if failed is not None:
            raise failed
        raise EOFError("the other end of the connection is gone") from self._ended

    def close(self) -> None:
        """Close the connection. What was sent still leaves, but for large messages."""
        if self._transport is not None and not self._closing and self._ended is None:
            self._closing = True
            self._transport.writelines(self._writer.take_small(MAX_QUEUED_BYTES))
            self._transport.close()

    def abort(self) -> None:
        """Cut the connection at once."""
        self._end(ConnectionAbortedError("cut here"))

    # What the event loop calls.

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Begin the handshake."""
        self._transport = cast("asyncio.Transport", transport)
        self._writable = True
        self._heard = self._said = self._clock.now()
        self._timer = asyncio.get_running_loop().call_later(HANDSHAKE_SECONDS, self._tick)
        try:
            self._check(transport)
        except HandshakeError as error:
            self._end(error)
        else:
            if self._handshake is not None:
                self._transport.write(self._handshake.begin())

    def get_buffer(self, sizehint: int) -> memoryview:
        """Return memory for what comes next."""
        if self._handshake is not None:
            # Not a byte more: what follows the proof belongs to the reader.
            self._came = bytearray(self._handshake.need - len(self._proof))
            return memoryview(self._came)
        return self._reader.buffer()

    @property
    def due(self) -> int:
        """Bytes still to come of the chunk that is being read."""
        return self._reader.due

    def buffer_updated(self, nbytes: int) -> None:
        """Take what has come."""
        self._heard = self._clock.now()
        try:
            if self._handshake is not None:
                self._prove(nbytes)
            else:
                for event in self._reader.advance(nbytes):
                    self._take(event)
                    if self._ended is not None:
                        return
        except (HandshakeError, ValueError, msgspec.MsgspecError) as error:
            log.warning("a connection is cut: %s", error)
            self._end(error)

    def eof_received(self) -> None:
        """Close: nothing more will come."""

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._end(exc or ConnectionResetError("closed by the other end"))

    def pause_writing(self) -> None:
        """Wait until the socket takes more."""
        self._writable = False

    def resume_writing(self) -> None:
        """Go on writing."""
        self._writable = True
        self._flush()

    # Inside.

    def _prove(self, count: int) -> None:
        handshake, transport = self._handshake, self._transport
        if handshake is None or transport is None:
            return
        self._proof += bytes(self._came[:count])
        if len(self._proof) < handshake.need:
            return
        data, self._proof = self._proof, b""
        answer = handshake.take(data)
        if answer:
            transport.write(answer)
        if not handshake.need:
            self._handshake = None
            self._schedule_tick()
            if not self.ready.done():
                self.ready.set_result(None)
            self._flush()

    def _take(self, event: Event) -> None:
        match event:
            case WireMessage(header, buffers, number):
                if number is not None:
                    self._received(number, buffers)
                self._deliver(header, buffers)
            case Offered(number, offer, unasked=True):
                self._sent_unasked(number, offer)
            case Offered(number, offer):
                self._offered(number, offer)
                if offer.accepts_credit and self._shared.ours is None:
                    self._credit.extend(sum(offer.sizes))
            case Withdrawn(number):
                withdraw = self._withdraw.pop(number, None)
                if withdraw is not None:
                    withdraw()
                self._arriving.pop(number, None)
                self._look_again()
            case Credited(num_bytes):
                self._writer.on_credit(num_bytes)
                self._flush_soon()
            case Returned():
                self._credit.on_revoked()

    def _deliver(self, header: "bytes | memoryview", buffers: Sequence[Buffer]) -> None:
        message = self._decoder.decode(header, buffers)
        if self._taker is None:
            self._arrived.append(message)
            self._changed.set()
            return
        try:
            self._taker(message)
        except Exception as error:
            # Raised where it is awaited.
            self._taker, self._taker_failed = None, error
            self._changed.set()

    def _received(self, number: int, buffers: Sequence[Buffer]) -> None:
        """Let later messages use the named buffers of a large message."""
        names, present = self._arriving.pop(number)
        for part, buffer in enumerate(buffers, 1):
            name = names[part]
            if name:
                own = name.startswith(OWN_NAME)
                self._cache.use(name, buffer, lasting=not own, new=part not in present)
                if own:
                    buffer.name = ""
        self._look_again()

    def _look_again(self) -> None:
        for _ in range(len(self._deferred)):
            number, offer = self._deferred.popleft()
            if number in self._reader.waiting:
                self._offered(number, offer)

    def _offered(self, number: int, offer: BufferOffer) -> None:
        names = offer.names
        named = {name for name in names if name}
        if named and any(named.intersection(coming) for coming, _ in self._arriving.values()):
            # It shares a buffer with a message on its way, and need not bring that again.
            self._deferred.append((number, offer))
            return
        present = {
            part: buffer
            for part, (size, name) in enumerate(zip(offer.sizes, names, strict=True))
            if part and name and (buffer := self._cache.find(name, size)) is not None
        }
        sizes = [0 if part in present else size for part, size in enumerate(offer.sizes)]
        self._arriving[number] = names, frozenset(present)
        ours = self._shared.ours

        def allocate(part: int, num_bytes: int) -> memoryview | None:
            # Not the header, which must not change while it is decoded, nor what a cache keeps.
            lasting = bool(names[part]) and not names[part].startswith(OWN_NAME)
            return None if ours is None or not part or lasting else ours.reserve(num_bytes)

        def granted(places: list[memoryview]) -> None:
            self._withdraw.pop(number, None)
            parts = [present.get(part, place) for part, place in enumerate(places)]
            offsets: dict[int, int] = {}
            for part, place in enumerate(places):
                if ours is not None and (offset := ours.offset(place)) is not None:
                    offsets[part] = offset
            self._writer.grant(number, tuple(present), offsets)
            self._flush_soon()
            message = self._reader.accept(number, parts, names, offsets)
            if message is not None:
                self._take(message)

        withdraw = self._memory.request(sizes, granted, allocate)
        if number in self._reader.waiting:
            self._withdraw[number] = withdraw

    def _sent_unasked(self, number: int, offer: BufferOffer) -> None:
        places = self._credit.spend(offer.sizes)
        self._arriving[number] = offer.names, frozenset()
        message = self._reader.accept(number, places, offer.names)
        if message is not None:
            self._take(message)
        self._credit.extend(sum(offer.sizes))

    def _give_credit(self, num_bytes: int) -> None:
        self._writer.credit(num_bytes)
        self._flush_soon()

    def _granted(self, number: int, present: Sequence[int], offsets: Mapping[int, int]) -> None:
        self._writer.on_grant(number, present, offsets)
        self._flush_soon()

    def _flush_soon(self) -> None:
        # What is sent in one turn of the event loop leaves together.
        if not self._flushing and self._ended is None:
            self._flushing = True
            asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = False
        transport = self._transport
        if transport is None or self._handshake is not None:
            return
        size = 0
        while self._writable and self._ended is None and not self._closing:
            pieces = self._writer.take(WRITE_BYTES)
            if not pieces:
                return
            self._said = self._clock.now()
            transport.writelines(pieces)
            if self._writer.idle:
                return
            size += sum(map(len, pieces))
            if size >= WRITE_BYTES or self._shared.theirs:
                # A socket need not fill while the other end reads: others have their turn now.
                self._flush_soon()
                return

    def _schedule_tick(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        self._timer = asyncio.get_running_loop().call_later(PING_SECONDS, self._tick)

    def _tick(self) -> None:
        if self._ended is not None:
            return
        now = self._clock.now()
        if self._handshake is not None:
            self._end(TimeoutError("no proof came"))
        elif now - self._heard > SILENCE_SECONDS:
            self._end(TimeoutError(f"nothing came for {SILENCE_SECONDS:g} s"))
        else:
            self._credit.tick()
            if self._reader.due and self._transport is not None:
                # What came of it is a sign of life, though too little to be woken for.
                self._transport.resume_reading()
            if now - self._said >= PING_SECONDS:
                self._writer.ping()
                self._flush_soon()
            self._schedule_tick()

    def _end(self, reason: Exception) -> None:
        if self._ended is not None:
            return
        # Without the frames, which hold memory that is shared, or was read into.
        self._ended = reason.with_traceback(None)
        if self._timer is not None:
            self._timer.cancel()
        if self._transport is not None:
            self._transport.abort()
        for withdraw in tuple(self._withdraw.values()):
            withdraw()
        self._withdraw.clear()
        self._credit.close()
        # Connections are in cycles of references: the memory must not wait for a collection.
        self._reader.clear()
        self._writer.clear()
        self._shared = NOTHING_SHARED
        self._lending.close()
        self._arriving.clear()
        self._deferred.clear()
        if not self.ready.done():
            self.ready.set_exception(reason)
            # Whoever dialled sees it; a listener has nobody to tell.
            self.ready.exception()
        self._changed.set()
