"""What is too large for one message.

Parts of it on a connection of their own, as many as the receiver asks for.

The sender offers a transfer and tells its sizes; the receiver makes room and grants chunks; the
sender sends as many as were granted. All that a receiver has granted and not received stays within
one window, over all its transfers, so the server in between never holds more than that. A transfer
that is interrupted is dropped, never resumed: whoever sent the message sends it anew.

What a receiver has already is not sent: an offer names its parts, and the first credit says which
of them are there. From then on the receiver holds those, so it may forget whatever it likes. Of
messages with the same buffer, such as the choices of a request, one goes first.
"""

import asyncio
import logging
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import TypeAlias
from weakref import ref

from inlay import liveness
from inlay.errors import InlayError, OverloadedError
from inlay.prompt import Buffer
from inlay.transport.nats.connection import Connection
from inlay.transport.nats.direct import Sink
from inlay.transport.nats.embeds_cache import EmbedsCache
from inlay.transport.nats.inbound import Inbound
from inlay.transport.nats.notices import (
    MAX_NAMED,
    Credit,
    Dropped,
    Named,
    Notice,
    Offer,
    Taken,
    Withdrawn,
)
from inlay.transport.nats.outbound import Outbound
from inlay.transport.nats.subjects import Subjects

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
NAMED_BYTES = 16 * 1024
"""Bytes of a buffer from which on it is asked whether it is there already.

Smaller ones are sent in the same time.
"""
_HEADER_BYTES = 256 * 1024
"""Bytes of a header that comes with its offer, at most."""
_SPARE_BYTES = 32 * 1024
"""Bytes of an offer beside its header, at most."""
SILENCE_SECONDS = 3.0
"""A receiver that says nothing for so long is gone."""
_STALLED_SECONDS = 5.0
"""A sender that may send and does not for so long has given up, or what it sent was lost."""

Room: TypeAlias = Callable[[int], "memoryview | None"]


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
        kept: EmbedsCache | None = None,
    ) -> None:
        """Nothing is under way.

        Args:
            bulk: the connection of the chunks alone.
            subjects: of the namespace.
            id_: of the participant.
            tell: sends a notice to another participant.
            deliver: takes (sender, header, buffers) of what has come.
            room: gives writable memory for a large buffer, or None where there is none.
            kept: what has come before; what is in use alone unless given.
        """
        self._bulk = bulk
        self._subjects = subjects
        self._id = id_
        self._tell = tell
        self._deliver = deliver
        self._room = room
        self._kept = kept or EmbedsCache(0)
        self._numbers = count(1)
        self._out: dict[int, Outbound] = {}
        self._carriers: dict[tuple[str, str], Outbound] = {}
        self._own_names: dict[int, tuple[ref[Buffer], str]] = {}
        self._pumps: dict[int, asyncio.Task[None]] = {}
        self._in: dict[tuple[str, int], Inbound] = {}
        # Two queues: those that memory is kept for must not stand behind one that has to wait for
        # theirs.
        self._waiting: deque[Inbound] = deque()
        self._wanting: deque[Inbound] = deque()
        self._ahead = 0
        self._held = 0

    async def open(self) -> None:
        """Begin to receive."""
        everything = self._subjects.chunks(self._id) + ".*"
        await self._bulk.receive(
            everything, Sink(everything.partition("*")[0], self._place, self._placed)
        )

    # Sending.

    def offer(self, to: str, header: bytes, buffers: Sequence[Buffer]) -> Outbound:
        """Send a message that is too large to be sent at once, or of which the receiver may have a part."""
        parts = [memoryview(header), *(buffer.view for buffer in buffers)]
        chunk = min(CHUNK_BYTES, self._bulk.max_payload)
        named = tuple(
            Named(part, buffer.name or self._own_name(buffer), bool(buffer.name))
            for part, buffer in enumerate(buffers, 1)
            if len(buffer) >= NAMED_BYTES
        )[:MAX_NAMED]
        outbound = Outbound(to, next(self._numbers), parts, chunk, named)
        self._out[outbound.number] = outbound
        self._pumps[outbound.number] = asyncio.create_task(self._pump(outbound))
        return outbound

    def _own_name(self, buffer: Buffer) -> str:
        """Of a buffer that has none: this object, for as long as it lives."""
        key = id(buffer)
        known = self._own_names.get(key)
        if known is not None and known[0]() is buffer:
            return known[1]
        name = f"{self._id}.{next(self._numbers)}"

        def forget(dead: "ref[Buffer]") -> None:
            # Another buffer may have its id by now.
            if self._own_names.get(key, (None,))[0] is dead:
                del self._own_names[key]

        self._own_names[key] = ref(buffer, forget), name
        return name

    def withdraw(self, outbound: Outbound) -> None:
        """Send no more of it."""
        if not outbound.done.done():
            self._tell(outbound.to, Withdrawn(outbound.number))
            outbound.fail(OverloadedError("the request was withdrawn"))

    async def _pump(self, outbound: Outbound) -> None:
        subject = self._subjects.chunks(outbound.to, self._id, outbound.number)
        sent = 0
        try:
            await self._wait_for_carriers(outbound)
            since = self._bulk.since
            if not outbound.done.done():
                self._tell_offer(outbound)
            while not outbound.done.done():
                if sent >= outbound.granted:
                    outbound.more.clear()
                    await outbound.more.wait()
                    continue
                if self._bulk.since != since:
                    raise OverloadedError("the connection to NATS was cut", retry_after=1)
                await self._bulk.send(f"{subject}.{sent}", outbound.chunk(sent))
                sent += 1
        except InlayError as error:
            self._tell(outbound.to, Withdrawn(outbound.number))
            outbound.fail(error)
        finally:
            for name in outbound.names:
                if self._carriers.get((outbound.to, name)) is outbound:
                    del self._carriers[outbound.to, name]
            del self._out[outbound.number], self._pumps[outbound.number]

    async def _wait_for_carriers(self, outbound: Outbound) -> None:
        """Return when no other transfer brings its receiver a buffer of this one.

        Where that has arrived, this one need not.
        """
        arrived: set[str] = set()
        while not outbound.done.done():
            found = {
                name: self._carriers.get((outbound.to, name)) for name in outbound.names - arrived
            }
            carriers = {
                name: one for name, one in found.items() if one is not None and not one.done.done()
            }
            if not carriers:
                break
            ends = {outbound.done, *(carrier.done for carrier in carriers.values())}
            await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
            arrived |= {name for name, carrier in carriers.items() if carrier.arrived}
        if outbound.done.done():
            return
        # All at once: who waits carries nothing, so nobody waits in a circle.
        for name in outbound.names - arrived:
            self._carriers[outbound.to, name] = outbound

    def _tell_offer(self, outbound: Outbound) -> None:
        header = outbound.header
        if len(header) > min(_HEADER_BYTES, self._bulk.max_payload - _SPARE_BYTES):
            header = b""
        outbound.heard = liveness.now()
        self._tell(
            outbound.to,
            Offer(outbound.number, outbound.sizes, outbound.chunk_bytes, header, outbound.named),
        )

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
        outbound.heard = liveness.now()
        if isinstance(notice, Credit):
            outbound.grant(notice)
        elif isinstance(notice, Taken):
            if not outbound.done.done():
                outbound.done.set_result(None)
        else:
            outbound.fail(
                OverloadedError(
                    f"{sender} did not take the request: {notice.reason}", retry_after=1
                )
            )

    def _offered(self, sender: str, offer: Offer) -> None:
        refusal = offer.refusal(MEMORY_BYTES)
        if refusal is not None:
            self._tell(sender, Dropped(offer.transfer, refusal))
            return
        inbound = Inbound(sender, offer, liveness.now())
        if inbound.key in self._in:
            return
        inbound.look(self._kept)
        if not inbound.missing:
            self._finish(inbound)
            return
        inbound.look(None)
        self._in[inbound.key] = inbound
        self._waiting.append(inbound)
        self._grant()

    def _admit(self) -> None:
        """Keep memory for those that wait for it, in the order they came.

        A small one never overtakes a large one.
        """
        while self._waiting:
            inbound = self._waiting[0]
            inbound.look(self._kept)
            if inbound.missing and self._held + inbound.size > MEMORY_BYTES:
                inbound.look(None)
                return
            self._waiting.popleft()
            if inbound.missing:
                inbound.plan()
                self._held += inbound.size
                self._wanting.append(inbound)
            else:
                del self._in[inbound.key]
                self._finish(inbound)

    def _grant(self) -> None:
        self._admit()
        while self._wanting:
            inbound = self._wanting[0]
            granted = min(inbound.granted + _QUANTUM, len(inbound.places))
            new = sum(stop - start for _, start, stop in inbound.places[inbound.granted : granted])
            if self._ahead and self._ahead + new > WINDOW_BYTES:
                return
            self._wanting.popleft()
            if not inbound.granted:
                self._make_room(inbound)
            self._ahead += new
            inbound.granted = granted
            inbound.moved = liveness.now()
            self._tell(inbound.sender, inbound.credit)
            if granted < len(inbound.places):
                self._wanting.append(inbound)

    def _make_room(self, inbound: Inbound) -> None:
        for part in {part for part, _, _ in inbound.places}:
            size = inbound.offer.sizes[part]
            room = self._room(size) if self._room is not None and size >= _OWN_ROOM else None
            inbound.parts[part] = memoryview(bytearray(size)) if room is None else room

    def _place(self, subject: str, size: int) -> memoryview | None:
        """Where a chunk belongs, or None where it is not what was to come next."""
        inbound = self._inbound(subject)
        if inbound is None or not inbound.granted:
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
        if inbound is None or not inbound.granted:
            return
        _, start, stop = inbound.places[inbound.received]
        inbound.received += 1
        inbound.moved = liveness.now()
        self._ahead -= stop - start
        if inbound.received == len(inbound.places):
            self._release(inbound)
            self._finish(inbound)
        self._grant()

    def _finish(self, inbound: Inbound) -> None:
        """Hand on what has come, and what was there, of one that is no longer under way."""
        self._tell(inbound.sender, Taken(inbound.offer.transfer))
        header, *buffers = inbound.buffers()
        for named in inbound.offer.named:
            new = named.part not in inbound.present
            self._kept.use(named.name, buffers[named.part - 1], lasting=named.lasts, new=new)
        self._deliver(inbound.sender, header.view, buffers)

    def _inbound(self, subject: str) -> Inbound | None:
        sender, number, _ = subject.split(".")[-3:]
        return self._in.get((sender, int(number))) if number.isdecimal() else None

    def _drop(self, inbound: Inbound, reason: str) -> None:
        log.warning(
            "transfer %d from %s is dropped: %s", inbound.offer.transfer, inbound.sender, reason
        )
        self._tell(inbound.sender, Dropped(inbound.offer.transfer, reason))
        self._forget(inbound)

    def _forget(self, inbound: Inbound) -> None:
        self._release(inbound)
        self._grant()

    def _release(self, inbound: Inbound) -> None:
        del self._in[inbound.key]
        self._ahead -= inbound.ahead()
        if inbound in self._waiting:
            self._waiting.remove(inbound)
        else:
            self._held -= inbound.size
            if inbound in self._wanting:
                self._wanting.remove(inbound)

    def forget_sender(self, sender: str) -> None:
        """A participant is gone: nothing more comes from it."""
        for inbound in [inbound for inbound in self._in.values() if inbound.sender == sender]:
            self._release(inbound)
        self._grant()

    def tick(self) -> None:
        """Give signs of life, and end what shows none; about once a second."""
        now, since = liveness.now(), self._bulk.since
        for inbound in list(self._in.values()):
            if inbound.granted > inbound.received and now - inbound.moved > _STALLED_SECONDS:
                self._drop(inbound, f"nothing came for {_STALLED_SECONDS:g} s")
            else:
                self._tell(inbound.sender, inbound.credit)
        for outbound in self._out.values():
            if outbound.heard is None or since is None:
                continue
            if now - max(outbound.heard, since) > SILENCE_SECONDS:
                outbound.fail(
                    OverloadedError(
                        f"{outbound.to} was silent for {SILENCE_SECONDS:g} s", retry_after=1
                    )
                )

    async def close(self) -> None:
        """Give up what is under way."""
        for outbound in list(self._out.values()):
            outbound.fail(OverloadedError("the connection is closed"))
        await asyncio.gather(*self._pumps.values())
