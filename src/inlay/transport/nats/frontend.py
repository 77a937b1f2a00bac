"""The frontend's end of a fleet: workers found over NATS, one direct connection to each."""

import asyncio
import logging
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import msgspec
from nats.aio.msg import Msg

from inlay.base import liveness
from inlay.base.errors import (
    DeadlineExceededError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from inlay.messages.card import PROTOCOL, ModelCard
from inlay.messages.commands import LoadAdapter
from inlay.messages.digest import Secret
from inlay.messages.routing import FrontendLoad, KvEvents, KvSnapshot
from inlay.transport.api import FrameTransport, Loss, Worker
from inlay.transport.link import GONE, PeerLink
from inlay.transport.listener import dial
from inlay.transport.memory import ReceiveMemory
from inlay.transport.messages import FromWorker
from inlay.transport.nats.adapters import AdapterRecord, RecordedAdapter
from inlay.transport.nats.discovery import Discovery, FleetWorker
from inlay.transport.nats.member import Member
from inlay.transport.nats.messages import CacheEvents, DialRequest
from inlay.transport.nats.subjects import last_token
from inlay.transport.reverse_dial import ReverseDial
from inlay.transport.tls import Identity

log = logging.getLogger(__name__)

DRAIN_SECONDS = 10.0
"""Seconds within which the heartbeat of a worker must say that it drains."""
UNREACHABLE_SECONDS = 1.0
"""Seconds without an answer of NATS after which health says so."""
RECEIVE_BYTES = 1 << 30
"""Bytes of large answers that may be received or used at a time."""
_RETRY_SECONDS = 0.25
_MAX_WAIT = 2.0
"""Seconds between attempts to connect to a worker that cannot be reached."""

_cache_events = msgspec.msgpack.Decoder(CacheEvents)
_loads = msgspec.msgpack.Decoder(FrontendLoad)
_encode = msgspec.msgpack.Encoder().encode


@dataclass
class _Connected:
    """One incarnation of a worker, and the connection to it.

    Attributes:
        participant: the worker's id in the namespace.
        keeping: dials it, and again when the connection was cut.
        link: the connection, while there is one.
        wanted: it is dialled again when the connection ends.
        dialled: connections so far.
    """

    participant: str
    keeping: "asyncio.Task[None] | None" = None
    link: PeerLink | None = None
    wanted: bool = True
    dialled: int = 0


class NatsPlane:
    """`inlay.transport.api.Plane` and `inlay.messages.routing.RoutingFeed` of a fleet.

    A request goes to its worker's engine process over a direct connection. NATS carries what
    workers announce and what routers tell each other; while it is down requests go on.

    Args:
        member: joined as a frontend; closed with the plane.
        secret: of the namespace.
        identity: of the TLS server on which workers that dial connect; None: it has none.
        protocol: the version that is spoken.
    """

    def __init__(
        self,
        member: Member,
        secret: Secret,
        *,
        identity: Identity | None = None,
        protocol: int = PROTOCOL,
    ) -> None:
        self._member = member
        self._secret = secret
        self._memory = ReceiveMemory(RECEIVE_BYTES)
        self._reception = None if identity is None else ReverseDial(secret, self._memory, identity)
        self._discovery = Discovery(
            member,
            secret_fingerprint=secret.fingerprint,
            changed=self._follow,
            protocol=protocol,
        )
        self._record = AdapterRecord(member)
        member.keep(self._record.uphold)
        self._connected: dict[str, _Connected] = {}
        self._announced: Sequence[ModelCard] = ()
        self._changed = asyncio.Event()
        self._on_events: Callable[[str, KvEvents], None] | None = None
        self._on_load: Callable[[FrontendLoad], None] | None = None
        self._started = False
        self._subscribing: asyncio.Task[None] | None = None

    async def start(self) -> None:
        """Begin to learn of workers."""
        await self._discovery.start()
        self._started = True
        if self._on_events is not None:
            await self._subscribe_feed()

    async def listen_for_workers(self, host: str, bind: str, port: int) -> None:
        """Listen for workers that dial; as `ReverseDial.open`."""
        if self._reception is None:
            raise InvalidRequestError("this frontend has no certificate to listen with")
        await self._reception.open(host, bind, port)

    async def close(self) -> None:
        """Disconnect; workers abort what is running."""
        await self._discovery.close()
        if self._reception is not None:
            await self._reception.close()
        connected, self._connected = self._connected, {}
        tasks = [one.keeping for one in connected.values() if one.keeping is not None]
        tasks += [] if self._subscribing is None else [self._subscribing]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self._member.leave()

    def workers(self) -> Sequence[Worker]:
        """The workers that are ready now."""
        return [
            link
            for worker in self._discovery.workers()
            if worker.ready and (link := self._link(worker)) is not None and link.ready
        ]

    def announced(self) -> Sequence[ModelCard]:
        return self._announced

    def unavailable(self) -> Mapping[str, str]:
        """Reasons why workers are sent no requests, by participant."""
        stranger = self._member.stranger
        found = self._discovery.unavailable()
        return found if stranger is None else {**found, self._member.id: stranger}

    def losses(self) -> Mapping[tuple[str, Loss], int]:
        return self._discovery.losses

    def unreachable(self) -> str | None:
        seconds = self._member.control.silent_for
        return (
            f"NATS has not answered for {seconds:.1f} s" if seconds > UNREACHABLE_SECONDS else None
        )

    async def drain(self, worker_id: str) -> None:
        connected = self._by_link(worker_id)
        if connected is None:
            raise NotFoundError(f"no worker {worker_id!r} is ready", param="worker")
        control, subjects = self._member.control, self._member.subjects
        control.publish(subjects.drains(connected.participant), b"")
        try:
            async with liveness.timeout(DRAIN_SECONDS):
                while (
                    worker := self._discovery.find(connected.participant)
                ) is not None and worker.ready:
                    await self._discovery.changed()
        except TimeoutError as error:
            raise DeadlineExceededError(
                f"{worker_id} did not say within {DRAIN_SECONDS:g} s that it drains"
            ) from error

    async def record_adapter(self, model: str, order: LoadAdapter) -> None:
        await self._record.add(model, RecordedAdapter(order.name, order.path, order.sha256))

    async def forget_adapter(self, models: Iterable[str], name: str) -> bool:
        return await self._record.drop(models, name)

    async def changed(self) -> None:
        """Return at the next change of the set of ready workers or of a card."""
        await self._changed.wait()

    def room(self, num_bytes: int) -> memoryview | None:
        """None: no memory is shared with other machines."""
        return None

    # Connections.

    def _link(self, worker: FleetWorker) -> PeerLink | None:
        found = self._connected.get(worker.id)
        return None if found is None else found.link

    def _by_link(self, worker_id: str) -> _Connected | None:
        for connected in self._connected.values():
            if connected.link is not None and connected.link.id == worker_id:
                return connected
        return None

    def _tell(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    def _follow(self) -> None:
        """Connect to the workers there are; connections to others end by themselves."""
        found = self._discovery.workers()
        there = {worker.id: worker for worker in found}
        self._announced = tuple(worker.card for worker in found if worker.ready)
        for id_, connected in self._connected.items():
            connected.wanted = id_ in there
        for id_, worker in there.items():
            if id_ not in self._connected:
                connected = self._connected[id_] = _Connected(worker.participant)
                connected.keeping = asyncio.create_task(self._keep(id_, connected))
        self._tell()

    async def _keep(self, id_: str, connected: _Connected) -> None:
        wait = _RETRY_SECONDS
        try:
            while connected.wanted:
                dialled = connected.dialled
                await self._connect(id_, connected)
                wait = _RETRY_SECONDS if connected.dialled > dialled else min(2 * wait, _MAX_WAIT)
                await asyncio.sleep(wait)
        finally:
            if self._connected.get(id_) is connected:
                del self._connected[id_]

    async def _connect(self, id_: str, connected: _Connected) -> None:
        """Dial a worker, and take its answers until the connection ends."""
        worker = self._discovery.find(connected.participant)
        if worker is None or worker.id != id_:
            connected.wanted = False
            return
        if not worker.ready:
            return
        try:
            carrier = await self._carrier(worker)
        except OverloadedError as error:
            if connected.wanted:
                self._discovery.set_unavailable(worker.participant, error.message)
            return
        # A worker's id is never used again, and no two connections name requests alike.
        name = f"{id_}.{connected.dialled}" if connected.dialled else id_
        scope = f"@{secrets.token_hex(4)}"
        connected.dialled += 1
        link = connected.link = PeerLink(name, carrier, self._tell, scope=scope)
        self._discovery.set_unavailable(worker.participant, None)
        try:
            await link.run()
        finally:
            connected.link = None
            carrier.close()
            self._tell()

    async def _carrier(self, worker: FleetWorker) -> FrameTransport[FromWorker]:
        """Dial a worker, or have it dial. Raises `OverloadedError` if there is no connection."""
        if worker.card.address is not None:
            return await dial(worker.card.address, self._secret, FromWorker, self._memory)
        if not worker.card.dials:
            raise OverloadedError("its card has no address", retry_after=1)
        if self._reception is None:
            raise OverloadedError(
                "it dials frontends, and this one listens nowhere (--transport-host)", retry_after=1
            )
        subject = self._member.subjects.invitations(worker.participant)
        return await self._reception.call(
            lambda address, token: self._member.control.publish(
                subject, _encode(DialRequest(address, token))
            )
        )

    # `inlay.messages.routing.RoutingFeed`.

    def listen(
        self, events: Callable[[str, KvEvents], None], loads: Callable[[FrontendLoad], None]
    ) -> None:
        """As `RoutingFeed.listen`; before or after `start`."""
        self._on_events, self._on_load = events, loads
        if self._started:
            self._subscribing = asyncio.create_task(self._subscribe_feed())

    async def _subscribe_feed(self) -> None:
        control, subjects = self._member.control, self._member.subjects
        await control.subscribe(subjects.cache_events(), self._on_cache_message)
        await control.subscribe(subjects.loads(), self._on_load_message)

    def publish(self, load: FrontendLoad) -> None:
        subject = self._member.subjects.loads(self._member.id)
        self._member.control.publish(subject, _encode(load))

    async def kv_snapshot(self, worker_id: str) -> KvSnapshot:
        connected = self._by_link(worker_id)
        if connected is None or connected.link is None:
            raise OverloadedError(GONE, retry_after=1)
        return await connected.link.kv_snapshot()

    def _on_cache_message(self, message: Msg) -> None:
        try:
            told = _cache_events.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("cache events of %s are not understood: %s", message.subject, error)
            return
        worker = self._discovery.find(last_token(message.subject))
        if worker is None or worker.beat.incarnation != told.incarnation:
            return
        link = self._link(worker)
        if link is not None and self._on_events is not None:
            self._on_events(link.id, told.events)

    def _on_load_message(self, message: Msg) -> None:
        if last_token(message.subject) == self._member.id or self._on_load is None:
            return
        try:
            load = _loads.decode(message.data)
        except msgspec.MsgspecError as error:
            log.warning("the load of %s is not understood: %s", message.subject, error)
            return
        self._on_load(load)
