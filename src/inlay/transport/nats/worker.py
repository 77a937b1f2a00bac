"""The worker's end of a fleet: its card, heartbeats and cache events over NATS."""

import asyncio
import logging
from collections.abc import Callable
from contextlib import suppress
from typing import Protocol, TypeVar

import msgspec
from nats.aio.msg import Msg

from inlay.base import liveness
from inlay.base.errors import InlayError, InvalidRequestError, OverloadedError
from inlay.messages.card import PROTOCOL, Address, ModelCard, Rollout, Stats
from inlay.messages.commands import (
    Drain,
    LoadAdapter,
    ReadStats,
    UnloadAdapter,
    WorkerCommand,
    name_of,
)
from inlay.messages.request import Task
from inlay.messages.routing import KvEvents
from inlay.transport.nats.adapters import AdapterRecord, Recorded
from inlay.transport.nats.cards import CARD_SECONDS
from inlay.transport.nats.member import Member
from inlay.transport.nats.messages import Beat, CacheEvents, DialRequest
from inlay.transport.nats.presence import present_since
from inlay.transport.nats.subjects import PROMPTS

log = logging.getLogger(__name__)

BEAT_SECONDS = 0.5
_ROLL_SECONDS = 0.02
_STATS_SECONDS = 1.0
_RETRY_SECONDS = 1.0
_DRAIN_SECONDS = 0.05
LINGER_SECONDS = 8.0
"""Seconds for which a drained worker gives the pages of what it gave up, at most."""
QUIET_SECONDS = 1.0
"""Seconds without a page asked for after which nobody is expected to ask for more."""
_REFRESH_SECONDS = CARD_SECONDS / 3

R = TypeVar("R")

_PLAIN = Rollout()

_encode = msgspec.msgpack.Encoder().encode
_invitations = msgspec.msgpack.Decoder(DialRequest)


class AnnouncedEngine(Protocol):
    """An engine that a fleet is told of, in this process or another."""

    def watch(self, announce: Callable[[ModelCard], None]) -> Callable[[], None]: ...

    def watch_cache(self, tell: Callable[[KvEvents], None]) -> None: ...

    async def call(self, command: WorkerCommand[R]) -> R: ...

    def forget_prompt(self, key: str | None) -> None: ...


class NatsWorker:
    """Announces an engine to every frontend of the namespace.

    Heartbeats come from the event loop of this object, so no engine may run on that. Requests do
    not pass here: frontends connect to the engine's own process.

    Args:
        member: joined as a worker; closed with this.
        engine: whose card has an address, or says that it dials.
        dial: connects the engine to a frontend, with the token of its invitation.
        on_drain: called when a frontend has been told to have this worker drain and end.
        rollout: what the worker asks for in a change of its model; `since` is found out.
        protocol: the version that is announced.
    """

    def __init__(
        self,
        member: Member,
        engine: AnnouncedEngine,
        *,
        dial: Callable[[Address, bytes], None] | None = None,
        on_drain: Callable[[], None] | None = None,
        rollout: Rollout = _PLAIN,
        protocol: int = PROTOCOL,
    ) -> None:
        self._member = member
        self._dial = dial
        self._on_drain = on_drain
        self._engine = engine
        self._protocol = protocol
        self._rollout = rollout
        self._record = AdapterRecord(member)
        self._adopted: Recorded = ()
        self._looking = asyncio.Event()
        self._returned = False
        self._finding: tuple[str, asyncio.Task[float]] | None = None
        self._answering_roll: asyncio.TimerHandle | None = None
        self._tasks: list[asyncio.Task[None]] = []
        self._card: ModelCard | None = None
        self._unpublished = asyncio.Event()
        self._published = asyncio.Event()
        self._revision = 0
        self._incarnation = 0
        self._state = "away"
        self._stats = Stats()
        self._stats_at = liveness.now()

    @property
    def id(self) -> str:
        """Of the participant."""
        return self._member.id

    @property
    def ready(self) -> bool:
        """True while frontends may send requests."""
        return self._state == "ready"

    async def start(self) -> None:
        """Announce the engine's card. Raises `OverloadedError` when NATS does not answer."""
        control, subjects = self._member.control, self._member.subjects
        await control.subscribe(subjects.deleted(PROMPTS), self._on_deleted_prompt)
        await control.subscribe(subjects.roll_call, lambda _: self._beat_soon())
        if self._dial is not None:
            await control.subscribe(subjects.invitations(self.id), self._on_invitation)
        if (on_drain := self._on_drain) is not None:
            await control.subscribe(subjects.drains(self.id), lambda _: on_drain())
        await control.settle()
        control.on_reconnect(self._unpublished.set)
        # Prompts that were deleted meanwhile are not announced again.
        control.on_reconnect(lambda: self._engine.forget_prompt(None))
        self._engine.watch(self.announce)
        self._engine.watch_cache(self._publish_cache_events)
        self._member.keep(self._look)
        loops = (self._publish, self._beat_on, self._read_stats, self._follow_record)
        self._tasks = [asyncio.create_task(loop()) for loop in loops]

    async def wait_announced(self) -> ModelCard:
        """Return its card, once frontends can know of it."""
        await self._published.wait()
        if self._card is None:
            raise AssertionError("what is published is a card")
        return self._card

    def announce(self, card: ModelCard) -> None:
        """Publish a new card. After `away` it is a new incarnation."""
        if self._state == "away" and not self._returned:
            self._incarnation += 1
            self._returned = True
        self._card = card
        self._unpublished.set()

    def away(self) -> None:
        """Say that there is no engine until the next `announce`."""
        self._returned = False
        if self._state == "ready":
            self._state = "away"
            # While the engine starts again.
            if self._card is not None:
                finding = asyncio.create_task(present_since(self._member, self._card))
                self._finding = self._card.weights_id, finding
            self._beat()

    async def start_drain(self) -> int:
        """Take no more requests; return how many run or wait in the engine."""
        if self._state != "left":
            self._state = "draining"
            self._beat()
        return await self._drain()

    async def drain(self, seconds: float) -> None:
        """Take no more requests; return when those there are have ended.

        After `seconds` the rest is given up. It goes on at other workers, which fetch its pages
        from here.
        """
        await self.start_drain()
        with suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                # The engine tells when it is asked, and no other time.
                while await self._drain():  # noqa: ASYNC110
                    await asyncio.sleep(_DRAIN_SECONDS)
                return
        await self._drain(give_up=True)
        if self._card is not None and self._card.kv_layout:
            await self._linger()

    async def _linger(self) -> None:
        """Return once pages have not been asked for in a while."""
        until, quiet, given = liveness.now() + LINGER_SECONDS, liveness.now(), -1
        while (now := liveness.now()) < min(until, quiet + QUIET_SECONDS):
            with suppress(InlayError):
                stats = await self._engine.call(ReadStats())
                if stats.kv_pages_given != given:
                    given, quiet = stats.kv_pages_given, now
            await asyncio.sleep(_DRAIN_SECONDS)

    async def _drain(self, *, give_up: bool = False) -> int:
        try:
            return (await self._engine.call(Drain(give_up))).requests
        except InlayError:
            return 0

    async def close(self) -> None:
        """Leave: frontends send further requests elsewhere."""
        self._state = "left"
        self._beat()
        tasks = [*self._tasks, *([] if self._finding is None else [self._finding[1]])]
        for task in tasks:
            task.cancel()
        if self._answering_roll is not None:
            self._answering_roll.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        with suppress(InlayError):
            await self._member.cards.remove(self.id)
        await self._member.leave()

    def _beat(self) -> None:
        beat = Beat(
            self._protocol,
            self._incarnation,
            self._revision,
            self._state,
            self._stats,
            liveness.now() - self._stats_at,
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
        while True:
            self._beat()
            await asyncio.sleep(BEAT_SECONDS)

    def _on_deleted_prompt(self, message: Msg) -> None:
        self._engine.forget_prompt(message.data.decode("ascii", "replace"))

    def _on_invitation(self, message: Msg) -> None:
        try:
            invitation = _invitations.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("an invitation is not understood: %s", error)
            return
        if self._dial is not None:
            self._dial(invitation.address, invitation.token)

    def _publish_cache_events(self, events: KvEvents) -> None:
        subject = self._member.subjects.cache_events(self.id)
        self._member.control.publish(subject, _encode(CacheEvents(self._incarnation, events)))

    async def _publish(self) -> None:
        said = ""
        while True:
            with suppress(TimeoutError):
                async with asyncio.timeout(_REFRESH_SECONDS):
                    await self._unpublished.wait()
            self._unpublished.clear()
            if self._card is None:
                continue
            try:
                await self._come(self._card)
                card = msgspec.structs.replace(self._card, rollout=self._rollout)
                self._revision = await self._member.cards.put(self.id, card)
            except OverloadedError as error:
                # Once for each reason: it is tried again until it succeeds.
                if error.message != said:
                    log.warning("%s", error.message)
                    said = error.message
                self._unpublished.set()
                await asyncio.sleep(_RETRY_SECONDS)
                continue
            said = ""
            self._published.set()
            self._beat()

    async def _come(self, card: ModelCard) -> None:
        """Be ready with a new engine, once it has what the namespace has recorded for its model.

        And once it is known since when there are its weights: they begin anew where no other worker
        has them, see `inlay.router.shares`.
        """
        if not self._is_coming():
            return
        incarnation, self._adopted = self._incarnation, ()
        await self._adopt(card)
        finding, self._finding = self._finding, None
        if finding is not None and finding[0] == card.weights_id:
            since = await finding[1]
        else:
            since = await present_since(self._member, card)
        self._rollout = msgspec.structs.replace(self._rollout, since=since)
        if self._is_coming() and incarnation == self._incarnation:
            self._state = "ready"

    def _is_coming(self) -> bool:
        return self._returned and self._state == "away"

    async def _adopt(self, card: ModelCard) -> None:
        """Have the engine load what is recorded since the last time, until nothing new is.

        What cannot be loaded is logged, and listed as failed. Raises `OverloadedError`.
        """
        if card.role is Task.ENCODE:
            return
        loaded: set[str] = set()
        while (recorded := await self._recorded(card.name)) != self._adopted:
            for adapter in recorded:
                if adapter not in self._adopted:
                    loaded.add(adapter.name)
                    await self._follow(adapter.order)
            # Unloaded everywhere else while it was loading here.
            for name in loaded - {adapter.name for adapter in recorded}:
                loaded.remove(name)
                await self._follow(UnloadAdapter(name))
            self._adopted = recorded

    async def _follow(self, command: LoadAdapter | UnloadAdapter) -> None:
        try:
            await self._engine.call(command)
        except InlayError as error:
            log.error(
                "%s of the namespace's adapter %r failed: %s",
                name_of(command),
                command.name,
                error.message,
            )

    async def _recorded(self, model: str) -> Recorded:
        try:
            return await self._record.read(model)
        except InvalidRequestError as error:
            log.error("%s", error.message)
            return self._adopted

    async def _look(self) -> None:
        self._looking.set()

    async def _follow_record(self) -> None:
        """Load also what was recorded while this worker became ready."""
        while True:
            await self._looking.wait()
            self._looking.clear()
            if self._card is not None and self._state == "ready":
                try:
                    await self._adopt(self._card)
                except InlayError as error:
                    log.warning("%s", error.message)

    async def _read_stats(self) -> None:
        while True:
            with suppress(InlayError):
                self._stats = await self._engine.call(ReadStats())
                self._stats_at = liveness.now()
            await asyncio.sleep(_STATS_SECONDS)
