"""The frontend's end of the plane over NATS."""

import asyncio
import logging
from collections.abc import Callable, Mapping, Sequence
from itertools import count

import msgspec
from nats.aio.msg import Msg

from inlay.card import PROTOCOL, ModelCard
from inlay.errors import InlayError, OverloadedError
from inlay.routing import FrontendLoad, KvEvents, KvSnapshot
from inlay.transport.api import Worker
from inlay.transport.nats.link import GONE, Link
from inlay.transport.nats.member import Member
from inlay.transport.nats.messages import Acknowledge, Beat, CacheEvents, ToFrontend
from inlay.transport.nats.silence import Clock
from inlay.transport.nats.subjects import last_token

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
_TICKS_A_WORD = 2
_TICKS_A_TRANSFER = 4
PARTED_SECONDS = 15.0
"""Without a connection of our own for so long, what is under way fails."""
LOADING = "it is loading its model"
"""Reason why a worker without a card is unavailable."""
UNREACHABLE_SECONDS = 1.0
"""Without a sign of NATS for so long, whoever asks is told that no worker can be reached."""
_REMEMBERED_SECONDS = 60.0
"""How long a worker that went away is spoken of."""

_beats = msgspec.msgpack.Decoder(Beat)
_cache_events = msgspec.msgpack.Decoder(CacheEvents)
_loads = msgspec.msgpack.Decoder(FrontendLoad)
_encode = msgspec.msgpack.Encoder().encode


class NatsPlane:
    """`inlay.transport.api.Plane` over NATS.

    The workers are those whose heartbeats are heard and whose cards fit.

    Args:
        member: joined as a frontend; closed with the plane.
        secret_fingerprint: of the secret we make digests with; workers with another are refused.
            None where we send no requests.
        protocol: the version we speak; we talk to the one before and the one after.
    """

    def __init__(
        self, member: Member, *, secret_fingerprint: str | None, protocol: int = PROTOCOL
    ) -> None:
        self._member = member
        self._fingerprint = secret_fingerprint
        self._protocol = protocol
        self._clock = Clock(member.control)
        self._numbers = count(1)
        self._links: dict[str, Link] = {}
        self._missing: dict[str, tuple[str, float]] = {}
        self._serving: set[Link] = set()
        self._learning: dict[str, asyncio.Task[None]] = {}
        self._ticks = 0
        self._ticking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()
        self._on_events: Callable[[str, KvEvents], None] | None = None
        self._on_load: Callable[[FrontendLoad], None] | None = None
        self._subscribing: asyncio.Task[None] | None = None
        self._mailbox = member.mailbox(ToFrontend, take=self._take, unheard=self._unheard)

    async def start(self) -> None:
        """Begin to learn of workers."""
        await self._mailbox.open()
        await self._member.control.subscribe(self._member.subjects.beats(), self._hear)
        self._member.control.publish(self._member.subjects.roll_call, b"")
        if self._on_events is not None:
            await self._subscribe_feed()
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Give up what is under way and disconnect."""
        beside = (self._ticking, self._subscribing)
        tasks = [*self._learning.values(), *(task for task in beside if task is not None)]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for link in self._links.values():
            link.fail("the frontend is closing")
        self._links.clear()
        await self._mailbox.transfers.close()
        await self._member.leave()

    def workers(self) -> Sequence[Worker]:
        """The workers that are ready now."""
        return [link for link in self._links.values() if link.ready]

    def links(self) -> Sequence[Link]:
        """Every worker that is heard and fits, ready or not."""
        return list(self._links.values())

    def unavailable(self) -> Mapping[str, str]:
        """The workers that are there and are not sent requests, or were lately, and why."""
        return {participant: reason for participant, (reason, _) in self._missing.items()}

    def unreachable(self) -> str | None:
        """As `inlay.transport.api.Reaches`: requests wait for NATS, which may come back."""
        seconds = self._member.control.silent_for
        return (
            f"NATS has not answered for {seconds:.1f} s" if seconds > UNREACHABLE_SECONDS else None
        )

    async def changed(self) -> None:
        """Return at the next change of the set of ready workers, of a card or of what is missing.

        Any number may wait.
        """
        await self._changed.wait()

    def room(self, num_bytes: int) -> memoryview | None:
        """None: everything is copied on its way."""
        return None

    # What routers are told: `inlay.routing.RoutingFeed`.

    def listen(
        self, events: Callable[[str, KvEvents], None], loads: Callable[[FrontendLoad], None]
    ) -> None:
        """As `RoutingFeed.listen`; before or after `start`."""
        self._on_events, self._on_load = events, loads
        if self._ticking is not None:
            self._subscribing = asyncio.create_task(self._subscribe_feed())

    async def _subscribe_feed(self) -> None:
        control, subjects = self._member.control, self._member.subjects
        await control.subscribe(subjects.cache_events(), self._hear_cache)
        await control.subscribe(subjects.loads(), self._hear_load)

    def publish(self, load: FrontendLoad) -> None:
        """As `RoutingFeed.publish`."""
        control = self._member.control
        control.publish(self._member.subjects.loads(self._member.id), _encode(load))

    async def kv_snapshot(self, worker_id: str) -> KvSnapshot:
        """As `RoutingFeed.kv_snapshot`."""
        for link in self._links.values():
            if link.id == worker_id:
                return await link.kv_snapshot()
        raise OverloadedError(GONE, retry_after=1)

    def _hear_cache(self, message: Msg) -> None:
        try:
            told = _cache_events.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("what %s tells of its cache is not understood: %s", message.subject, error)
            return
        link = self._links.get(last_token(message.subject))
        if (
            link is not None
            and link.beat.incarnation == told.incarnation
            and self._on_events is not None
        ):
            self._on_events(link.id, told.events)

    def _hear_load(self, message: Msg) -> None:
        if last_token(message.subject) == self._member.id or self._on_load is None:
            return
        try:
            load = _loads.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("what %s tells of its load is not understood: %s", message.subject, error)
            return
        self._on_load(load)

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _set_unavailable(self, participant: str, reason: str | None) -> None:
        known = self._missing.pop(participant, None)
        if reason is not None:
            if known is None or known[0] != reason:
                log.warning("worker %s: %s", participant, reason)
                self._tell()
            self._missing[participant] = (reason, self._clock.now())

    # Who is there.

    def _hear(self, message: Msg) -> None:
        participant = last_token(message.subject)
        try:
            beat = _beats.decode(message.data)
        except msgspec.MsgspecError as error:
            self._set_unavailable(participant, f"its heartbeat is not understood: {error}")
            return
        if abs(beat.protocol - self._protocol) > 1:
            self._drop(
                participant,
                f"it speaks version {beat.protocol} of the protocol, this frontend {self._protocol - 1} to "
                f"{self._protocol + 1}: update the older of the two",
            )
            return
        if beat.state == "left":
            self._drop(participant, None)
            return
        if not beat.revision:
            self._set_unavailable(participant, LOADING)
            return
        link = self._links.get(participant)
        if link is not None and link.beat.incarnation != beat.incarnation:
            self._drop(participant, "its engine was started again")
            link = None
        if link is None:
            self._learn(participant, beat)
            return
        was, revision = link.ready, link.beat.revision
        link.hear(beat)
        if link.ready != was:
            self._judge(link)
            self._tell()
        if beat.revision != revision:
            self._learn(participant, beat)

    def _learn(self, participant: str, beat: Beat) -> None:
        if participant not in self._learning:
            task = asyncio.create_task(self._read_card(participant, beat))
            self._learning[participant] = task
            task.add_done_callback(lambda _: self._learning.pop(participant, None))

    async def _read_card(self, participant: str, beat: Beat) -> None:
        try:
            found = await self._member.cards.get(participant)
        except InlayError as error:
            self._set_unavailable(participant, error.message)
            return
        except msgspec.MsgspecError as error:
            self._drop(participant, f"its card is not understood: {error}")
            return
        if found is None or found[0] < beat.revision:
            return  # The card is on its way; the next heartbeat asks again.
        card = found[1]
        if self._fingerprint is not None and card.secret_fingerprint != self._fingerprint:
            self._drop(
                participant,
                f"it has the secret {card.secret_fingerprint or 'of nobody'}, this frontend {self._fingerprint}: "
                "digests would not meet",
            )
            return
        self._admit(participant, beat, card)

    def _admit(self, participant: str, beat: Beat, card: ModelCard) -> None:
        link = self._links.get(participant)
        if link is not None and link.beat.incarnation == beat.incarnation:
            link.card = card
        else:
            self._links[participant] = link = Link(
                participant,
                beat,
                card,
                self._mailbox,
                self._clock,
                self._numbers,
                lambda: self._member.control.connected,
            )
        self._judge(link)
        self._tell()

    def _judge(self, link: Link) -> None:
        """Miss a worker that takes no requests, and say of one that does so for the first time, or again."""
        if not link.ready:
            self._serving.discard(link)
            self._set_unavailable(link.participant, _said(link.beat))
            return
        self._set_unavailable(link.participant, None)
        if link not in self._serving:
            self._serving.add(link)
            log.info("worker %s serves %s", link.participant, link.card.name)

    def _drop(self, participant: str, reason: str | None) -> None:
        link = self._links.pop(participant, None)
        if link is not None:
            self._serving.discard(link)
        self._set_unavailable(participant, reason)
        self._mailbox.transfers.forget_sender(participant)
        if link is not None:
            link.fail(f"the worker is gone: {reason or 'it has left'}")
            self._tell()

    # What they say.

    def _take(self, sender: str, message: ToFrontend) -> None:
        link = self._links.get(sender)
        if link is not None:
            link.take(message)
        else:
            # Given up long ago, as it thinks it has something of ours: it has not any more.
            self._mailbox.send(sender, Acknowledge((), all=True))

    def _unheard(self, participant: str) -> None:
        link = self._links.get(participant)
        if link is not None:
            link.unheard()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            self._ticks += 1
            parted = self._member.control.lost_for > PARTED_SECONDS
            for participant, link in list(self._links.items()):
                if parted:
                    self._drop(participant, "NATS is out of reach")
                elif link.gone:
                    self._drop(participant, "it sends no heartbeats")
                elif self._ticks % _TICKS_A_WORD == 0:
                    link.tick()
            if self._ticks % _TICKS_A_TRANSFER == 0:
                self._mailbox.transfers.tick()
                self._forget_missing()

    def _forget_missing(self) -> None:
        now = self._clock.now()
        for participant, (_, at) in list(self._missing.items()):
            if now - at > _REMEMBERED_SECONDS:
                del self._missing[participant]


def _said(beat: Beat) -> str:
    return {"draining": "it is draining", "away": "it has no engine now"}.get(
        beat.state, beat.state
    )
