"""Discovery of a fleet's workers: heartbeats say which are there, cards say what they serve."""

import asyncio
import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from nats.aio.msg import Msg

from inlay.base import liveness
from inlay.base.errors import InlayError
from inlay.messages.card import PROTOCOL, ModelCard, Stats
from inlay.transport.api import Loss
from inlay.transport.nats.member import Member
from inlay.transport.nats.messages import OLDEST, Beat
from inlay.transport.nats.subjects import last_token

log = logging.getLogger(__name__)

TICK_SECONDS = 0.25
GONE_SECONDS = 3.0
"""A worker without a heartbeat for so long is gone, counted while NATS could be heard."""
LOADING = "it is loading its model"
"""Reason why a worker without a card is unavailable."""
_REMEMBERED_SECONDS = 60.0
"""Seconds for which a worker that went away is listed as unavailable."""

_beats = msgspec.msgpack.Decoder(Beat)


@dataclass
class FleetWorker:
    """A worker that announces itself.

    Attributes:
        participant: its id in the namespace, which its next incarnation keeps.
        beat: its last heartbeat.
        revision: of `card`.
        card: its last card that was read.
        heard: time of the last heartbeat (`inlay.base.liveness`).
    """

    participant: str
    beat: Beat
    revision: int
    card: ModelCard
    heard: float

    @property
    def id(self) -> str:
        """Of this incarnation."""
        return f"{self.participant}.{self.beat.incarnation}"

    @property
    def ready(self) -> bool:
        """True if it takes requests, and may."""
        return self.beat.state == "ready" and self.refusal is None

    @property
    def refusal(self) -> str | None:
        """Reason why it serves in no pool, though it would."""
        check = self.card.self_check
        return check.reason if check is not None and check.result == "differs" else None

    @property
    def stats(self) -> Stats:
        """Its engine's counters at the last heartbeat."""
        return self.beat.stats


class Discovery:
    """The workers of a namespace, as their heartbeats and cards show them.

    Attributes:
        losses: workers that went without saying so, by model.

    Args:
        member: joined as a frontend.
        secret_fingerprint: of the secret that digests are made with; workers with another are
            refused. None accepts all.
        changed: called when a worker comes, changes its state or card, or goes.
        protocol: the version that is spoken.
    """

    def __init__(
        self,
        member: Member,
        *,
        secret_fingerprint: str | None,
        changed: Callable[[], None] = lambda: None,
        protocol: int = PROTOCOL,
    ) -> None:
        self.losses: Counter[tuple[str, Loss]] = Counter()
        self._member = member
        self._fingerprint = secret_fingerprint
        self._notify = changed
        self._protocol = protocol
        self._workers: dict[str, FleetWorker] = {}
        self._unavailable: dict[str, tuple[str, float]] = {}
        self._serving: set[str] = set()
        self._reading: dict[str, asyncio.Task[None]] = {}
        self._ticking: asyncio.Task[None] | None = None
        self._changed = asyncio.Event()

    async def start(self) -> None:
        """Begin to listen, and ask all workers for a heartbeat."""
        await self._member.control.subscribe(self._member.subjects.beats(), self._on_beat)
        self._member.control.publish(self._member.subjects.roll_call, b"")
        self._ticking = asyncio.create_task(self._tick())

    async def close(self) -> None:
        """Stop to listen."""
        tasks = [*self._reading.values(), *([self._ticking] if self._ticking else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    def workers(self) -> Sequence[FleetWorker]:
        """Every worker that is there and fits, ready or not."""
        return list(self._workers.values())

    def find(self, participant: str) -> FleetWorker | None:
        """A worker by its participant's id."""
        return self._workers.get(participant)

    def unavailable(self) -> Mapping[str, str]:
        """Reasons why workers are sent no requests, by participant."""
        noted = {participant: reason for participant, (reason, _) in self._unavailable.items()}
        refused = {
            worker.participant: worker.refusal
            for worker in self.workers()
            if worker.beat.state == "ready" and worker.refusal is not None
        }
        return noted | refused

    async def changed(self) -> None:
        """Return at the next change; any number may wait."""
        await self._changed.wait()

    def set_unavailable(self, participant: str, reason: str | None) -> None:
        """Note why a worker is sent no requests; with None, that it is."""
        known = self._unavailable.pop(participant, None)
        if reason is not None:
            if known is None or known[0] != reason:
                log.warning("worker %s: %s", participant, reason)
                self._tell()
            self._unavailable[participant] = (reason, liveness.now())

    def _tell(self) -> None:
        self._notify()
        self._changed.set()
        self._changed = asyncio.Event()

    def _on_beat(self, message: Msg) -> None:
        participant = last_token(message.subject)
        try:
            beat = _beats.decode(message.data)
        except msgspec.MsgspecError as error:
            self.set_unavailable(participant, f"its heartbeat is not understood: {error}")
            return
        oldest = min(OLDEST, self._protocol)
        if not oldest <= beat.protocol <= self._protocol + 1:
            self._drop(
                participant,
                f"it speaks version {beat.protocol} of the protocol, this frontend {oldest} to "
                f"{self._protocol + 1}: update the older of the two",
            )
            return
        if beat.state == "left":
            self._drop(participant, None)
            return
        if not beat.revision:
            self.set_unavailable(participant, LOADING)
            return
        worker = self._workers.get(participant)
        if worker is not None and worker.beat.incarnation != beat.incarnation:
            self._drop(participant, "its engine was started again", "restarted")
            worker = None
        if worker is None:
            self._read_soon(participant, beat)
            return
        was, worker.beat, worker.heard = worker.beat, beat, liveness.now()
        if was.state != beat.state:
            self._judge(worker)
            self._tell()
        if worker.revision != beat.revision:
            self._read_soon(participant, beat)

    def _read_soon(self, participant: str, beat: Beat) -> None:
        if participant not in self._reading:
            task = asyncio.create_task(self._read_card(participant, beat))
            self._reading[participant] = task
            task.add_done_callback(lambda _: self._reading.pop(participant, None))

    async def _read_card(self, participant: str, beat: Beat) -> None:
        try:
            found = await self._member.cards.get(participant)
        except InlayError as error:
            self.set_unavailable(participant, error.message)
            return
        except msgspec.MsgspecError as error:
            self._drop(participant, f"its card is not understood: {error}")
            return
        if found is None or found[0] < beat.revision:
            return  # The card is on its way; the next heartbeat asks again.
        revision, card = found
        if self._fingerprint is not None and card.secret_fingerprint != self._fingerprint:
            self._drop(
                participant,
                f"it has the secret {card.secret_fingerprint or 'of nobody'}, this frontend "
                f"{self._fingerprint}: digests would not meet",
            )
            return
        worker = self._workers.get(participant)
        if worker is not None and worker.beat.incarnation == beat.incarnation:
            worker.revision, worker.card = revision, card
        else:
            worker = FleetWorker(participant, beat, revision, card, liveness.now())
            self._workers[participant] = worker
        self._judge(worker)
        self._tell()

    def _judge(self, worker: FleetWorker) -> None:
        """Note a worker that takes no requests, and log one that takes them again."""
        participant = worker.participant
        if not worker.ready:
            self._serving.discard(participant)
            state = worker.beat.state
            refusal = worker.refusal if state == "ready" else None
            self.set_unavailable(participant, refusal or _STATES.get(state, state))
            return
        self.set_unavailable(participant, None)
        if participant not in self._serving:
            self._serving.add(participant)
            log.info("worker %s serves %s", participant, worker.card.name)

    def _drop(self, participant: str, reason: str | None, loss: Loss | None = None) -> None:
        worker = self._workers.pop(participant, None)
        if worker is not None and loss is not None:
            self.losses[worker.card.name, loss] += 1
        self._serving.discard(participant)
        self.set_unavailable(participant, reason)
        if worker is not None:
            self._tell()

    async def _tick(self) -> None:
        while True:
            await asyncio.sleep(TICK_SECONDS)
            now, since = liveness.now(), self._member.control.since
            if since is not None:
                for worker in self.workers():
                    if now - max(worker.heard, since) > GONE_SECONDS:
                        self._drop(
                            worker.participant,
                            f"no heartbeat came for {GONE_SECONDS:g} s",
                            "silent",
                        )
            for participant, (_, at) in list(self._unavailable.items()):
                if now - at > _REMEMBERED_SECONDS:
                    del self._unavailable[participant]


_STATES = {"draining": "it is draining", "away": "it has no engine now"}
