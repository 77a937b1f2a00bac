"""What is too large for one message: parts of it on a connection of their own, as many as the receiver asks for.

The sender offers a transfer and tells its sizes; the receiver makes room and grants chunks; the sender sends as many as were granted.
All that a receiver has granted and not received stays within one window, over all its transfers, so the server in between
never holds more than that. A transfer that is interrupted is dropped, never resumed: whoever sent the message sends it anew.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeAlias

import msgspec

from inlay.errors import InlayError, OverloadedError
from inlay.plane.nats.connection import Connection
from inlay.plane.nats.direct import Sink
from inlay.plane.nats.subjects import Subjects
from inlay.prompt import Buffer

log = logging.getLogger(__name__)

CHUNK_BYTES = 512 * 1024
WINDOW_BYTES = 16 * 1024 * 1024
"""What a receiver has granted and not received, at most."""
_QUANTUM = 4
"""Chunks granted at a time, so that transfers share the window."""
MEMORY_BYTES = 1024 * 1024 * 1024
"""What the transfers under way to a receiver may come to; more of them wait."""
_OWN_ROOM = 64 * 1024
"""Bytes of a buffer from which on it is received where `room` says."""
SILENCE_SECONDS = 3.0
"""A receiver that says nothing for so long is gone."""
_STALLED_SECONDS = 5.0
"""A sender that may send and does not for so long has given up, or what it sent was lost."""

Place: TypeAlias = "tuple[int, int, int]"
"""(part, first byte, past-last byte) of a chunk."""
Room: TypeAlias = Callable[[int], "memoryview | None"]


class Offer(msgspec.Struct, frozen=True, tag="offer", array_like=True):
    """A message will come in chunks of at most `chunk` bytes: the header of `sizes[0]` bytes, then buffers."""

    transfer: int
    sizes: tuple[int, ...]
    chunk: int


class Credit(msgspec.Struct, frozen=True, tag="credit", array_like=True):
    """So many chunks of the transfer may be sent in all. Said again while nothing changes: a sign of life."""

    transfer: int
    chunks: int


class Taken(msgspec.Struct, frozen=True, tag="taken", array_like=True):
    """All of the transfer has come."""

    transfer: int


class Dropped(msgspec.Struct, frozen=True, tag="dropped", array_like=True):
    """The receiver will take no more of the transfer."""

    transfer: int
    reason: str


class Withdrawn(msgspec.Struct, frozen=True, tag="withdrawn", array_like=True):
    """The sender will send no more of the transfer."""

    transfer: int


Notice: TypeAlias = Offer | Credit | Taken | Dropped | Withdrawn


def places(sizes: Sequence[int], chunk: int) -> list[Place]:
    """The chunks of parts of these sizes, in order; none spans two parts, and an empty part has none."""
    return [
        (part, start, min(start + chunk, size))
        for part, size in enumerate(sizes)
        for start in range(0, size, chunk)
    ]


class Outbound:
    """A transfer to another participant.

    Attributes:
        done: resolved when all of it has arrived; `OverloadedError` when it will not.
    """

    def __init__(self, to: str, number: int, parts: Sequence[memoryview], chunk: int, now: float) -> None:
        self.to = to
        self.number = number
        self.heard = now
        self.granted = 0
        self._parts = parts
        self.places = places([part.nbytes for part in parts], chunk)
        self.more = asyncio.Event()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        # Nobody may be waiting for it any more.
        self.done.add_done_callback(lambda done: done.cancelled() or done.exception())

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk."""
        part, start, stop = self.places[index]
        return self._parts[part][start:stop]

    def fail(self, error: InlayError) -> None:
        """End without having arrived."""
        if not self.done.done():
            self.done.set_exception(error)
        self.more.set()


class _Inbound:
    """A transfer from another participant."""

    def __init__(self, sender: str, offer: Offer, now: float) -> None:
        self.sender = sender
        self.number = offer.transfer
        self.sizes = offer.sizes
        self.places = places(offer.sizes, offer.chunk)
        self.size = sum(offer.sizes)
        self.moved = now
        self.granted = 0
        self.received = 0
        self.parts: list[memoryview] | None = None

    def ahead(self) -> int:
        """Bytes granted and not received."""
        return sum(stop - start for _, start, stop in self.places[self.received : self.granted])


class Transfers:
    """All transfers of one participant, both ways."""

    def __init__(
        self,
        bulk: Connection,
        subjects: Subjects,
        id_: str,
        *,
        tell: Callable[[str, Notice], None],
        deliver: Callable[[str, memoryview, list[Buffer]], None],
        room: Room | None = None,
    ) -> None:
        """Nothing is under way.

        Args:
            bulk: the connection of the chunks alone.
            subjects: of the namespace.
            id_: of the participant.
            tell: sends a notice to another participant.
            deliver: takes (sender, header, buffers) of what has come.
            room: gives writable memory for a large buffer, or None where there is none.
        """
        self._bulk = bulk
        self._subjects = subjects
        self._id = id_
        self._tell = tell
        self._deliver = deliver
        self._room = room
        self._numbers = count(1)
        self._out: dict[int, Outbound] = {}
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._in: dict[tuple[str, int], _Inbound] = {}
        # Two queues: those that memory is kept for must not stand behind one that has to wait for theirs.
        self._waiting: deque[_Inbound] = deque()
        self._wanting: deque[_Inbound] = deque()
        self._ahead = 0
        self._held = 0

    async def open(self) -> None:
        """Begin to receive."""
        everything = self._subjects.chunks(self._id) + ".*"
        await self._bulk.receive(everything, Sink(everything.partition("*")[0], self._place, self._placed))

    # Sending.

    def offer(self, to: str, header: bytes, buffers: Sequence[Buffer]) -> Outbound:
        """Send a message that is too large to be sent at once."""
        parts = [memoryview(header), *(buffer.view for buffer in buffers)]
        chunk = min(CHUNK_BYTES, self._bulk.max_payload)
        outbound = Outbound(to, next(self._numbers), parts, chunk, self._now())
        self._out[outbound.number] = outbound
        self._tell(to, Offer(outbound.number, tuple(part.nbytes for part in parts), chunk))
        self._pumps[outbound.number] = asyncio.create_task(self._pump(outbound))
        return outbound

    def withdraw(self, outbound: Outbound) -> None:
        """Send no more of it."""
        if not outbound.done.done():
            self._tell(outbound.to, Withdrawn(outbound.number))
            outbound.fail(OverloadedError("the request was withdrawn"))

    async def _pump(self, outbound: Outbound) -> None:
        subject = self._subjects.chunks(outbound.to, self._id, outbound.number)
        since = self._bulk.since
        try:
            for index in range(len(outbound.places)):
                while index >= outbound.granted and not outbound.done.done():
                    outbound.more.clear()
                    await outbound.more.wait()
                if outbound.done.done():
                    return
                if self._bulk.since != since:
                    raise OverloadedError("the connection to NATS was cut", retry_after=1)
                await self._bulk.send(f"{subject}.{index}", outbound.chunk(index))
            await asyncio.wait([outbound.done])
        except InlayError as error:
            self._tell(outbound.to, Withdrawn(outbound.number))
            outbound.fail(error)
        finally:
            del self._out[outbound.number], self._pumps[outbound.number]

    # Receiving.

    def hear(self, sender: str, notice: Notice) -> None:
        """Take a notice from another participant."""
        if isinstance(notice, Offer):
            self._offered(sender, notice)
        elif isinstance(notice, Withdrawn):
            inbound = self._in.get((sender, notice.transfer))
            if inbound is not None:
                self._forget(inbound)
        else:
            self._answered(sender, notice)

    def _answered(self, sender: str, notice: Credit | Taken | Dropped) -> None:
        outbound = self._out.get(notice.transfer)
        if outbound is None or outbound.to != sender:
            return
        outbound.heard = self._now()
        if isinstance(notice, Credit):
            if notice.chunks > outbound.granted:
                outbound.granted = notice.chunks
                outbound.more.set()
        elif isinstance(notice, Taken):
            if not outbound.done.done():
                outbound.done.set_result(None)
        else:
            outbound.fail(
                OverloadedError(f"{sender} did not take the request: {notice.reason}", retry_after=1)
            )

    def _offered(self, sender: str, offer: Offer) -> None:
        inbound = _Inbound(sender, offer, self._now())
        if inbound.size > MEMORY_BYTES or offer.chunk < 1:
            self._tell(sender, Dropped(offer.transfer, f"{inbound.size} bytes; at most {MEMORY_BYTES}"))
        elif (sender, offer.transfer) not in self._in:
            self._in[sender, offer.transfer] = inbound
            self._waiting.append(inbound)
            self._grant()

    def _admit(self) -> None:
        """Keep memory for those that wait for it, in the order they came: a small one never overtakes a large one."""
        while self._waiting and self._held + self._waiting[0].size <= MEMORY_BYTES:
            inbound = self._waiting.popleft()
            self._held += inbound.size
            self._wanting.append(inbound)

    def _grant(self) -> None:
        self._admit()
        while self._wanting:
            inbound = self._wanting[0]
            granted = min(inbound.granted + _QUANTUM, len(inbound.places))
            new = sum(stop - start for _, start, stop in inbound.places[inbound.granted : granted])
            if self._ahead and self._ahead + new > WINDOW_BYTES:
                return
            self._wanting.popleft()
            if inbound.parts is None:
                inbound.parts = [self._memory(size) for size in inbound.sizes]
            self._ahead += new
            inbound.granted = granted
            inbound.moved = self._now()
            self._tell(inbound.sender, Credit(inbound.number, granted))
            if granted < len(inbound.places):
                self._wanting.append(inbound)

    def _memory(self, size: int) -> memoryview:
        room = self._room(size) if self._room is not None and size >= _OWN_ROOM else None
        return memoryview(bytearray(size)) if room is None else room

    def _place(self, subject: str, size: int) -> memoryview | None:
        """Where a chunk belongs, or None where it is not what was to come next."""
        inbound = self._inbound(subject)
        if inbound is None or inbound.parts is None:
            return None
        if not subject.endswith(f".{inbound.received}") or inbound.received >= inbound.granted:
            self._drop(inbound, "a part was lost")
            return None
        part, start, stop = inbound.places[inbound.received]
        if size != stop - start:
            self._drop(inbound, f"a part has {size} bytes instead of {stop - start}")
            return None
        return inbound.parts[part][start:stop]

    def _placed(self, subject: str) -> None:
        """All of a chunk is there."""
        inbound = self._inbound(subject)
        if inbound is None or inbound.parts is None:
            return
        _, start, stop = inbound.places[inbound.received]
        inbound.received += 1
        inbound.moved = self._now()
        self._ahead -= stop - start
        if inbound.received == len(inbound.places):
            self._tell(inbound.sender, Taken(inbound.number))
            self._forget(inbound)
            header, *buffers = inbound.parts
            self._deliver(inbound.sender, header, list(map(Buffer, buffers)))
        else:
            self._grant()

    def _inbound(self, subject: str) -> _Inbound | None:
        sender, number, _ = subject.split(".")[-3:]
        return self._in.get((sender, int(number))) if number.isdecimal() else None

    def _drop(self, inbound: _Inbound, reason: str) -> None:
        log.warning("transfer %d from %s is dropped: %s", inbound.number, inbound.sender, reason)
        self._tell(inbound.sender, Dropped(inbound.number, reason))
        self._forget(inbound)

    def _forget(self, inbound: _Inbound) -> None:
        del self._in[inbound.sender, inbound.number]
        self._ahead -= inbound.ahead()
        if inbound in self._waiting:
            self._waiting.remove(inbound)
        else:
            self._held -= inbound.size
            if inbound in self._wanting:
                self._wanting.remove(inbound)
        self._grant()

    def forget_sender(self, sender: str) -> None:
        """A participant is gone: nothing more comes from it."""
        for inbound in [inbound for inbound in self._in.values() if inbound.sender == sender]:
            self._forget(inbound)

    def tick(self) -> None:
        """Give signs of life, and end what shows none; about once a second."""
        now, since = self._now(), self._bulk.since
        for inbound in list(self._in.values()):
            if inbound.granted > inbound.received and now - inbound.moved > _STALLED_SECONDS:
                self._drop(inbound, f"nothing came for {_STALLED_SECONDS:g} s")
            else:
                self._tell(inbound.sender, Credit(inbound.number, inbound.granted))
        for outbound in self._out.values():
            if since is not None and now - max(outbound.heard, since) > SILENCE_SECONDS:
                outbound.fail(
                    OverloadedError(f"{outbound.to} was silent for {SILENCE_SECONDS:g} s", retry_after=1)
                )

    async def close(self) -> None:
        """Give up what is under way."""
        for outbound in list(self._out.values()):
            outbound.fail(OverloadedError("the connection is closed"))
        await asyncio.gather(*self._pumps.values())

    @staticmethod
    def _now() -> float:
        return asyncio.get_running_loop().time()
