"""Who is there, who is refused, and who agrees on a secret."""

import asyncio
import logging
from collections.abc import AsyncIterator
from functools import partial
from pathlib import Path

import msgspec
import pytest

from inlay.base.errors import InvalidRequestError, NotFoundError, OverloadedError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import EMBEDS_OFF, PROTOCOL, ModelCard
from inlay.messages.commands import ReadStats
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request, Sampling
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.link import PeerLink
from inlay.transport.local import LocalPlane
from inlay.transport.messages import Submit, ToWorker
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.nats.member import Member
from inlay.transport.nats.messages import Beat
from inlay.transport.nats.settings import NatsSettings
from inlay.transport.nats.worker import NatsWorker
from inlay.worker import EngineProxy
from inlay.worker.host import EngineHost
from tests.transport.fleet import SECRET, Fleet, card_of, found, identity
from tests.transport.nats_server import NatsServer
from tests.transport.test_conformance import collect, ids, make_request


@pytest.fixture
async def fleet(nats_server: NatsServer) -> AsyncIterator[Fleet]:
    fleet = Fleet(nats_server)
    yield fleet
    await fleet.close()


async def until(plane: NatsPlane, reason: str) -> None:
    """Return when the plane misses a worker for that reason."""
    async with asyncio.timeout(90):
        while not any(reason in said for said in plane.unavailable().values()):
            await plane.changed()


async def test_a_frontend_that_comes_later_learns_of_the_workers_that_are_there(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    for _ in range(3):
        await fleet.worker(EchoEngine(echo_settings, SECRET))
    workers = await found(await fleet.frontend(SECRET), 3)
    assert len({worker.id for worker in workers}) == 3
    for worker in workers:
        assert ids(await collect(worker.send(make_request("a", Tokens([3]), max_tokens=2)))) == [
            3,
            3,
        ]


async def test_a_worker_that_loads_its_model_is_told_from_one_that_is_not_there(
    fleet: Fleet, echo_settings: EngineSettings, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO, "inlay")
    plane = await fleet.frontend(SECRET)
    engine = EchoEngine(echo_settings, SECRET)
    await engine.start()
    worker = NatsWorker(await Member.join(fleet.settings, "worker"), EngineProxy(LocalPlane()))
    await worker.start()
    await until(plane, "it is loading its model")
    assert not plane.workers()
    endpoint = Endpoint(EngineHost(engine), SECRET, identity(), EmbedsCache(0))
    address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
    worker.announce(msgspec.structs.replace(engine.card, address=address))
    await found(plane)
    assert not plane.unavailable()
    said = [
        record.getMessage()
        for record in caplog.records
        if record.name == "inlay.transport.nats.discovery"
    ]
    assert said == [
        f"worker {worker.id}: it is loading its model",
        f"worker {worker.id} serves {engine.card.name}",
    ]
    await worker.close()
    await endpoint.close()
    await engine.close()


async def test_fleets_of_other_namespaces_are_not_seen(
    fleet: Fleet, nats_server: NatsServer, echo_settings: EngineSettings
) -> None:
    other = Fleet(nats_server)
    await other.worker(EchoEngine(echo_settings, SECRET))
    await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane = await fleet.frontend(SECRET)
    (worker,) = await found(plane)
    assert worker.id.startswith(fleet.workers[0].worker.id)
    await other.close()


async def test_a_card_that_changes_is_seen_by_every_frontend(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    worker = await fleet.worker(EchoEngine(echo_settings, SECRET))
    planes = [await fleet.frontend(SECRET) for _ in range(2)]
    for plane in planes:
        await found(plane)
    assert card_of(planes[0]).prompt_embeds is None
    worker.host._prompt_embeds = False
    worker.host._tell()
    for plane in planes:
        while card_of(plane).prompt_embeds != EMBEDS_OFF:
            await plane.changed()


async def test_a_card_that_changes_while_the_one_before_is_read_is_read_too(
    fleet: Fleet, echo_settings: EngineSettings, monkeypatch: pytest.MonkeyPatch
) -> None:
    worker = await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane = await fleet.frontend(SECRET)
    await found(plane)
    known = plane._discovery.find(worker.worker.id)
    assert known is not None
    cards, reading, later = plane._member.cards, asyncio.Event(), asyncio.Event()
    get = cards.get

    async def get_slowly(participant: str) -> tuple[int, ModelCard] | None:
        answer = await get(participant)
        reading.set()
        await later.wait()
        return answer

    monkeypatch.setattr(cards, "get", get_slowly)
    first, last = (
        msgspec.structs.replace(worker.host.card, engine_version=version) for version in "12"
    )
    worker.worker.announce(first)
    await reading.wait()
    before = known.beat.revision
    worker.worker.announce(last)
    async with asyncio.timeout(90):
        while known.beat.revision == before:  # noqa: ASYNC110 - heartbeats
            await asyncio.sleep(0.02)
        later.set()
        while known.card.engine_version != "2":
            await plane.changed()


async def test_a_worker_whose_engine_is_gone_is_routed_around_and_comes_back_as_another(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    worker = await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane = await fleet.frontend(SECRET)
    (before,) = await found(plane)
    worker.worker.away()
    while plane.workers():
        await plane.changed()
    assert list(plane.unavailable().values()) == ["it has no engine now"]
    await worker.cut()
    worker.worker.announce(worker.host.card)
    (after,) = await found(plane)
    assert after.id != before.id
    with pytest.raises(OverloadedError, match="gone"):
        before.send(make_request("a", Tokens([1])))


async def test_a_draining_worker_ends_what_it_has_and_is_not_routed_to(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    worker = await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane = await fleet.frontend(SECRET)
    (link,) = await found(plane)
    stream = link.send(make_request("a", Tokens([1]), max_tokens=20_000))
    iterator = aiter(stream)
    told = list(await anext(iterator))
    draining = asyncio.create_task(worker.worker.drain(30))
    while plane.workers():
        await plane.changed()
    with pytest.raises(OverloadedError, match="draining"):
        await collect(link.send(make_request("late", Tokens([1]))))
    told += [delta async for deltas in iterator for delta in deltas]
    assert len(ids(told)) == 20_000
    await draining


async def test_a_frontend_orders_one_worker_to_drain(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    draining: list[asyncio.Task[int]] = []

    def ordered(number: int) -> None:
        draining.append(asyncio.create_task(workers[number].worker.start_drain()))

    # As a process does: the order begins the drain.
    workers = [
        await fleet.worker(EchoEngine(echo_settings, SECRET), on_drain=partial(ordered, number))
        for number in range(2)
    ]
    plane = await fleet.frontend(SECRET)
    links = await found(plane, 2)
    (one, other) = sorted(links, key=lambda link: link.id.startswith(workers[1].member.id))
    await plane.drain(one.id)
    assert [worker.id for worker in plane.workers()] == [other.id]
    assert [await task for task in draining] == [0]
    with pytest.raises(NotFoundError, match="no worker 'nobody' is ready"):
        await plane.drain("nobody")


async def test_a_worker_that_leaves_says_so_at_once(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    worker = await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane = await fleet.frontend(SECRET)
    (link,) = await found(plane)
    iterator = aiter(link.send(make_request("a", Tokens([1]), max_tokens=150_000)))
    await anext(iterator)
    await worker.close()
    with pytest.raises(OverloadedError, match="gone"):
        async for _ in iterator:
            pass
    assert plane.workers() == []


async def test_a_version_talks_to_the_next(fleet: Fleet, echo_settings: EngineSettings) -> None:
    await fleet.worker(EchoEngine(echo_settings, SECRET), protocol=PROTOCOL + 1)
    (link,) = await found(await fleet.frontend(SECRET))
    answer = await collect(link.send(make_request("a", Tokens([1, 2]), max_tokens=3)))
    assert ids(answer) == [1, 2, 1]


@pytest.mark.parametrize("distance", [-1, 2])
async def test_versions_that_do_not_fit_are_refused_and_it_is_said_why(
    fleet: Fleet, echo_settings: EngineSettings, distance: int
) -> None:
    await fleet.worker(EchoEngine(echo_settings, SECRET), protocol=PROTOCOL + distance)
    plane = await fleet.frontend(SECRET)
    await until(plane, f"it speaks version {PROTOCOL + distance} of the protocol")
    assert plane.workers() == []


def test_what_a_later_version_adds_to_a_message_is_ignored() -> None:
    class LaterBeat(Beat, frozen=True, array_like=True):
        news: tuple[str, ...] = ("more",)

    beat = msgspec.msgpack.decode(msgspec.msgpack.encode(LaterBeat(2, 1, 5, "ready")), type=Beat)
    assert (beat.protocol, beat.incarnation, beat.revision) == (2, 1, 5)
    plain = Request(id="a", prompts=(Prompt.of(Tokens([1])),), params=Sampling(max_tokens=1))
    wire = msgspec.msgpack.decode(msgspec.msgpack.encode(Submit(plain)))
    wire[1]["of a later version"] = 1
    read: ToWorker = msgspec.msgpack.decode(msgspec.msgpack.encode(wire), type=ToWorker)
    assert read == Submit(plain)


async def test_a_worker_with_another_secret_is_refused_and_it_is_said_why(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    await fleet.worker(EchoEngine(echo_settings, Secret(b"x" * 32)))
    plane = await fleet.frontend(SECRET)
    await until(plane, f"this frontend {SECRET.fingerprint}: digests would not meet")
    assert plane.workers() == []


async def test_those_who_join_a_namespace_at_once_agree_on_its_secret(fleet: Fleet) -> None:
    members = await asyncio.gather(*(Member.join(fleet.settings, "worker") for _ in range(6)))
    secrets = await asyncio.gather(*(member.secret(None) for member in members))
    assert len({secret.root for secret in secrets}) == 1
    with pytest.raises(InvalidRequestError, match=rf"has the secret {secrets[0].fingerprint}"):
        await members[0].secret(SECRET)
    assert (await members[0].secret(secrets[0])).root == secrets[0].root
    for member in members:
        await member.leave()


async def test_a_secret_from_a_file_is_never_kept_in_nats(fleet: Fleet) -> None:
    member = await Member.join(fleet.settings, "frontend")
    assert (await member.secret(SECRET)).root == SECRET.root
    with pytest.raises(InvalidRequestError, match="--secret-file"):
        await member.secret(None)
    await member.leave()


async def test_a_server_that_is_not_there_is_named_and_nothing_is_called_cut(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.transport.nats.connection.CONNECT_SECONDS", 3600.0)
    nowhere = NatsSettings(nats=["nats://user:s3cret@127.0.0.1:1"], nats_wait=0.3)  # type: ignore[list-item]
    with pytest.raises(OverloadedError) as caught:
        await Member.join(nowhere, "worker")
    said = (
        "cannot reach NATS at nats://127.0.0.1:1: nothing listens there. Start it with `inlay nats`"
    )
    assert caught.value.message.startswith(said)
    assert "cut" not in caplog.text


async def test_a_server_that_comes_a_little_later_is_waited_for(tmp_path: Path) -> None:
    with NatsServer(tmp_path) as server:
        settings = server.settings().model_copy(update={"nats_wait": 60.0})
        server.kill()
        joining = asyncio.create_task(Member.join(settings, "worker"))
        await asyncio.sleep(0.1)
        assert not joining.done()
        await asyncio.to_thread(server.start)
        await (await joining).leave()


async def test_only_who_knows_the_password_is_let_in(tmp_path: Path) -> None:
    with NatsServer(
        tmp_path, extra='authorization { user: "inlay", password: "s3cret" }'
    ) as server:
        with pytest.raises(InvalidRequestError, match="does not let us in"):
            await Member.join(server.settings(), "worker")
        known = NatsSettings(nats=[server.url.replace("//", "//inlay:s3cret@")])  # type: ignore[list-item]
        await (await Member.join(known, "worker")).leave()


async def test_a_server_that_keeps_nothing_is_refused_and_it_is_said_why(tmp_path: Path) -> None:
    with (
        NatsServer(tmp_path, jetstream=False) as server,
        pytest.raises(InvalidRequestError, match="it needs JetStream"),
    ):
        await Member.join(server.settings(), "worker")


async def test_calls_are_answered_by_the_worker_that_was_asked(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    for _ in range(2):
        await fleet.worker(EchoEngine(echo_settings, SECRET))
    first, second = await found(await fleet.frontend(SECRET), 2)
    await collect(first.send(make_request("a", Tokens([1]), max_tokens=5)))
    counted = [(await worker.call(ReadStats())).generated_tokens for worker in (first, second)]
    assert counted == [5, 0]


async def test_a_worker_says_what_its_engine_counts_with_its_heartbeats(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane = await fleet.frontend(SECRET)
    (worker,) = await found(plane)
    await collect(worker.send(make_request("a", Tokens([1]), max_tokens=5)))
    async with asyncio.timeout(90):
        while plane._discovery.workers()[0].stats.generated_tokens != 5:  # noqa: ASYNC110  # nobody is told of a heartbeat
            await asyncio.sleep(0.02)


async def test_two_frontends_may_use_the_same_ids(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    await fleet.worker(EchoEngine(echo_settings, SECRET))
    planes = [await fleet.frontend(SECRET) for _ in range(2)]
    workers = [(await found(plane))[0] for plane in planes]
    answers = await asyncio.gather(
        *(
            collect(worker.send(make_request("same", Tokens([n]), max_tokens=300)))
            for n, worker in enumerate(workers)
        )
    )
    assert [set(ids(answer)) for answer in answers] == [{0}, {1}]


async def test_a_frontend_whose_messages_are_not_understood_is_cut_off_and_harms_nobody(
    fleet: Fleet, echo_settings: EngineSettings, caplog: pytest.LogCaptureFixture
) -> None:
    await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane, hostile = [await fleet.frontend(SECRET) for _ in range(2)]
    (link,) = await found(plane)
    (theirs,) = await found(hostile)
    assert isinstance(theirs, PeerLink)
    stream = link.send(make_request("a", Tokens([1]), max_tokens=2000))
    with caplog.at_level(logging.WARNING):
        theirs._say(Beat(1, 1, 1))
        await theirs.wait_gone()
    assert "is cut" in caplog.text
    assert ids(await collect(stream)) == [1] * 2000
