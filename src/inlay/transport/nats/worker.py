"""The worker's end of the plane over NATS."""

import asyncio
import logging
from collections.abc import Coroutine
from contextlib import suppress
from dataclasses import dataclass, field

import msgspec

from inlay import liveness
from inlay.card import PROTOCOL, ModelCard, Stats
from inlay.errors import ErrorFrame, InlayError, OverloadedError
from inlay.prompt import Buffer
from inlay.request import Command, EmbedOutput, EmbedRequest, Output, Reply, Request
from inlay.routing import CacheEventSource, KvEvents
from inlay.transport.api import RequestHandler
from inlay.transport.messages import GetCache
from inlay.transport.nats.cards import CARD_SECONDS
from inlay.transport.nats.embeds_cache import KEPT_BYTES, EmbedsCache
from inlay.transport.nats.member import Member
from inlay.transport.nats.messages import (
    Acknowledge,
    Again,
    Answer,
    Beat,
    CacheEvents,
    Call,
    Cancel,
    Embed,
    Embedded,
    EncodedPieces,
    Open,
    Submit,
    ToWorker,
)
from inlay.transport.nats.outgoing import Outgoing
from inlay.transport.nats.silence import Clock, Presence
from inlay.transport.nats.transfers import Room
from inlay.transport.pending_calls import answer_cache

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
FRONTEND_SECONDS = 5.0
"""A frontend that gives no sign of life for so long is gone, and with it whoever waited for its requests."""
_FRONTEND_UNHEARD_SECONDS = 3.0
PARTED_SECONDS = 60.0
"""Without a connection of our own for so long, nobody waits for what is under way."""
_ROLL_SECONDS = 0.02
_STATS_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_REFRESH_SECONDS = CARD_SECONDS / 3

_encode = msgspec.msgpack.Encoder().encode


@dataclass
class _Stream:
    """One attempt at one request.

    Attributes:
        key: what the engine knows it as.
        outgoing: its pieces; None of a request that is answered at once.
    """

    key: str
    outgoing: Outgoing | None = None


@dataclass
class _Peer:
    """A frontend that has, or had, works here."""

    presence: Presence
    streams: dict[int, _Stream] = field(default_factory=dict)
    unsent: dict[int, Outgoing] = field(default_factory=dict)


class NatsWorker:
    """Offers what a `RequestHandler` can do to every frontend of the namespace.

    Heartbeats and acknowledgements are this object's: they come from the event loop it lives on, so
    no engine may run on that.

    Args:
        member: joined as a worker; closed with this.
        handler: does the requests.
        room: gives writable memory for large rows that the handler reads in place, or None where
            there is none.
        kept_bytes: of stored prompts that have come, kept so that their next use moves no rows; 0
            keeps none.
        protocol: the version we say we speak.
    """

    def __init__(
        self,
        member: Member,
        handler: RequestHandler,
        *,
        room: Room | None = None,
        kept_bytes: int = KEPT_BYTES,
        protocol: int = PROTOCOL,
    ) -> None:
        self._member = member
        self._handler = handler
        self._protocol = protocol
        self._clock = Clock(member.control)
        self._kept = EmbedsCache(kept_bytes, liveness.now)
        self._mailbox = member.mailbox(
            ToWorker, take=self._take, unheard=self._unheard, room=room, kept=self._kept
        )
        self._peers: dict[str, _Peer] = {}
        self._flushing: asyncio.Handle | None = None
        self._answering_roll: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._calls: set[asyncio.Task[None]] = set()
        self._card: ModelCard | None = None
        self._unpublished = asyncio.Event()
        self._published = asyncio.Event()
        self._revision = 0
        self._incarnation = 0
        self._state = "away"
        self._stats = Stats()
        self._stats_at = self._clock.now()
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def id(self) -> str:
        """Of the participant."""
        return self._member.id

    async def start(self) -> None:
        """Announce the handler's card and take requests.

        Raises `OverloadedError` when NATS does not answer.
        """
        await self._mailbox.open()
        await self._member.control.subscribe(
            self._member.subjects.deleted_prompts,
            lambda told: self._kept.forget(told.data.decode("ascii", "replace")),
        )
        await self._member.control.subscribe(
            self._member.subjects.roll_call, lambda _: self._beat_soon()
        )
        await self._member.control.settle()
        await self._member.bulk.settle()
        self._member.control.on_reconnect(self._unpublished.set)
        # What was removed meanwhile is not told again.
        self._member.control.on_reconnect(self._kept.clear)
        self._handler.watch(self.announce)
        if isinstance(self._handler, CacheEventSource):
            self._handler.watch_cache(self._tell_cache)
        self._tasks = [
            asyncio.create_task(loop()) for loop in (self._publish, self._beat_on, self._ask_stats)
        ]

    async def wait_announced(self) -> ModelCard:
        """Its card, once frontends can know of it."""
        await self._published.wait()
        if self._card is None:
            raise AssertionError("what is published is a card")
        return self._card

    def announce(self, card: ModelCard) -> None:
        """Say what it is, or is by now. After `away` it is a new incarnation."""
        if self._state == "away":
            # What was still on its way to the engine that is gone lies in its memory too, all of
            # which it would hold.
            self._kept.clear()
            self._incarnation += 1
            self._state = "ready"
        self._card = card
        self._unpublished.set()

    def away(self) -> None:
        """Say that there is no engine until the next `announce`."""
        # It lies in the memory of an engine that is gone.
        self._kept.clear()
        if self._state == "ready":
            self._state = "away"
            self._beat()

    async def drain(self, seconds: float) -> None:
        """Take no more requests, and return when those under way have been told to their end, or `seconds` have passed."""
        if self._state != "left":
            self._state = "draining"
            self._beat()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._idle.wait()

    @property
    def under_way(self) -> int:
        """Requests that have not been told to their end."""
        return sum(len(peer.streams) for peer in self._peers.values())

    async def close(self) -> None:
        """Leave: frontends send elsewhere what is still under way."""
        self._state = "left"
        self._beat()
        for task in (*self._tasks, *self._calls):
            task.cancel()
        if self._answering_roll is not None:
            self._answering_roll.cancel()
        await asyncio.gather(*self._tasks, *self._calls, return_exceptions=True)
        for sender in list(self._peers):
            self._end_peer(sender)
        with suppress(InlayError):
            await self._member.cards.remove(self.id)
        await self._mailbox.transfers.close()
        await self._member.leave()

    # Being there.

    def _beat(self) -> None:
        beat = Beat(
            self._protocol,
            self._incarnation,
            self._revision,
            self._state,
            self._stats,
            self._clock.now() - self._stats_at,
        )
        self._member.control.publish(self._member.subjects.beats(self.id), _encode(beat))

    def _beat_soon(self) -> None:
        """Answer all who asked in this moment with one heartbeat."""
        if self._answering_roll is None:
            self._answering_roll = asyncio.get_running_loop().call_later(
                _ROLL_SECONDS, self._answer_roll
            )

    def _answer_roll(self) -> None:
        self._answering_roll = None
        self._beat()

    async def _beat_on(self) -> None:
        """Every half second: a heartbeat for all, and for each frontend what we have of its."""
        ticks = 0
        while True:
            ticks += 1
            self._beat()
            parted = self._member.control.lost_for > PARTED_SECONDS
            for sender, peer in list(self._peers.items()):
                if parted or peer.presence.gone:
                    self._end_peer(sender)
                elif peer.streams:
                    self._mailbox.send(sender, Open(_sent(peer)), probe=True)
            if ticks % 2 == 0:
                self._mailbox.transfers.tick()
                self._kept.tick()
            await asyncio.sleep(BEAT_SECONDS)

    async def _publish(self) -> None:
        warned = ""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REFRESH_SECONDS):
                    await self._unpublished.wait()
            self._unpublished.clear()
            if self._card is None:
                continue
            try:
                self._revision = await self._member.cards.put(self.id, self._card)
            except OverloadedError as error:
                if error.message != warned:
                    warned = error.message
                    log.warning("%s", warned)
                self._unpublished.set()
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            warned = ""
            self._published.set()
            self._beat()

    async def _ask_stats(self) -> None:
        while True:
            reply = await self._call(Command("stats"))
            if reply.error is None:
                self._stats = msgspec.convert(reply.value, Stats)
                self._stats_at = self._clock.now()
            await asyncio.sleep(_STATS_SECONDS)

    # What frontends say.

    def _take(self, sender: str, message: ToWorker) -> None:
        peer = self._peer(sender)
        peer.presence.hear()
        match message:
            case Submit(number, request):
                if number not in peer.streams:
                    self._generate(sender, peer, number, request)
            case Embed(number, embed_request):
                if number not in peer.streams:
                    self._embed(sender, peer, number, embed_request)
            case Cancel(numbers):
                for number in numbers:
                    if number in peer.streams:
                        self._handler.abort(peer.streams[number].key)
            case Acknowledge(streams, all=all_):
                self._acknowledged(sender, peer, dict(streams), all_)
            case Again(number, start):
                stream = peer.streams.get(number)
                if stream is not None and stream.outgoing is not None:
                    stream.outgoing.rewind(start)
                    self._send_soon(peer, number, stream.outgoing)
            case Call() as call:
                self._run(self._answer(sender, call))
            case GetCache(number):
                self._run(self._answer_cache(sender, number))

    def _peer(self, sender: str) -> _Peer:
        peer = self._peers.get(sender)
        if peer is None:
            presence = Presence(
                self._clock,
                gone_after=FRONTEND_SECONDS,
                gone_unheard_after=_FRONTEND_UNHEARD_SECONDS,
            )
            peer = self._peers[sender] = _Peer(presence)
        return peer

    def _unheard(self, participant: str) -> None:
        peer = self._peers.get(participant)
        if peer is not None:
            peer.presence.unheard()

    def _run(self, doing: Coroutine[object, object, None]) -> None:
        task = asyncio.create_task(doing)
        self._calls.add(task)
        task.add_done_callback(self._calls.discard)

    async def _answer(self, sender: str, call: Call) -> None:
        self._mailbox.send(sender, Answer(call.number, await self._call(call.command)))

    async def _call(self, command: Command) -> Reply:
        """What the handler answers; what is counted here is beside what its engine counts."""
        reply = await self._handler.call(command)
        if command.name != "stats" or reply.error is not None:
            return reply
        return Reply(reply.value | msgspec.structs.asdict(self._kept.stats))

    async def _answer_cache(self, sender: str, number: int) -> None:
        self._mailbox.send(sender, await answer_cache(number, self._handler))

    def _tell_cache(self, events: KvEvents) -> None:
        subject = self._member.subjects.cache_events(self.id)
        self._member.control.publish(subject, _encode(CacheEvents(self._incarnation, events)))

    def _register(self, peer: _Peer, number: int, stream: _Stream) -> None:
        peer.streams[number] = stream
        self._idle.clear()

    def _forget(self, peer: _Peer, number: int) -> None:
        peer.streams.pop(number, None)
        peer.unsent.pop(number, None)
        if not self.under_way:
            self._idle.set()

    def _refusing(self) -> ErrorFrame | None:
        if self._state == "ready":
            return None
        reason = (
            "the worker is draining"
            if self._state == "draining"
            else "the worker has no engine now"
        )
        return ErrorFrame.of(OverloadedError(reason, retry_after=1))

    def _generate(self, sender: str, peer: _Peer, number: int, request: Request) -> None:
        outgoing = Outgoing(number, self._mailbox.limit // 2)
        stream = _Stream(f"{sender}:{number}", outgoing)
        self._register(peer, number, stream)

        def emit(output: Output) -> None:
            if peer.streams.get(number) is stream:
                outgoing.add(output)
                self._send_soon(peer, number, outgoing)

        refusal = self._refusing()
        if refusal is not None:
            emit(
                Output(
                    request.id,
                    request.attempt,
                    len(request.prior_output),
                    finish_reason="error",
                    error=refusal,
                )
            )
            return
        self._handler.generate(msgspec.structs.replace(request, id=stream.key), emit)

    def _embed(self, sender: str, peer: _Peer, number: int, request: EmbedRequest) -> None:
        stream = _Stream(f"{sender}:{number}")
        self._register(peer, number, stream)

        def emit(vectors: EmbedOutput) -> None:
            if peer.streams.get(number) is not stream:
                return
            answer = Embedded(number, msgspec.structs.replace(vectors, request_id=""))
            transfer = self._mailbox.send(sender, answer)
            if transfer is None:
                self._forget(peer, number)
            else:
                transfer.done.add_done_callback(lambda _: self._forget(peer, number))

        refusal = self._refusing()
        if refusal is not None:
            emit(EmbedOutput(request.id, request.attempt, Buffer(b""), error=refusal))
            return
        self._handler.embed(msgspec.structs.replace(request, id=stream.key), emit)

    # What they are told.

    def _send_soon(self, peer: _Peer, number: int, outgoing: Outgoing) -> None:
        peer.unsent[number] = outgoing
        if self._flushing is None:
            self._flushing = asyncio.get_running_loop().call_soon(self._flush)

    def _flush(self) -> None:
        self._flushing = None
        for sender, peer in self._peers.items():
            if peer.unsent:
                unsent, peer.unsent = peer.unsent, {}
                self._send_pieces(
                    sender, [piece for one in unsent.values() for piece in one.take()]
                )

    def _send_pieces(self, sender: str, pieces: list[msgspec.Raw]) -> None:
        """As many messages as it takes for none to be a transfer, which could overtake or be overtaken."""
        limit = self._mailbox.limit - 1024
        batch: list[msgspec.Raw] = []
        size = 0
        for piece in pieces:
            length = len(memoryview(piece))
            if batch and size + length > limit:
                self._mailbox.send(sender, EncodedPieces(tuple(batch)))
                batch, size = [], 0
            batch.append(piece)
            size += length
        if batch:
            self._mailbox.send(sender, EncodedPieces(tuple(batch)))

    def _acknowledged(self, sender: str, peer: _Peer, used: dict[int, int], all_: bool) -> None:
        if not used.keys() <= peer.streams.keys():
            # It waits for what is not here: it never came, or it was given up.
            self._mailbox.send(sender, Open(_sent(peer)))
        for number, stream in list(peer.streams.items()):
            pieces = used.get(number)
            if pieces is None:
                if all_:
                    self._end_stream(peer, number)
            elif stream.outgoing is not None:
                stream.outgoing.acknowledge(pieces)
                if stream.outgoing.done:
                    self._forget(peer, number)
                else:
                    self._send_soon(peer, number, stream.outgoing)

    def _end_stream(self, peer: _Peer, number: int) -> None:
        """Nobody waits for it any more."""
        stream = peer.streams[number]
        self._forget(peer, number)
        if stream.outgoing is None or not stream.outgoing.ended:
            self._handler.abort(stream.key)

    def _end_peer(self, sender: str) -> None:
        peer = self._peers.pop(sender)
        if peer.streams:
            log.warning("frontend %s is gone: %d of its works end", sender, len(peer.streams))
        for number in list(peer.streams):
            self._end_stream(peer, number)
        self._mailbox.transfers.forget_sender(sender)


def _sent(peer: _Peer) -> tuple[tuple[int, int], ...]:
    return tuple(
        (number, 0 if stream.outgoing is None else stream.outgoing.sent)
        for number, stream in peer.streams.items()
    )
