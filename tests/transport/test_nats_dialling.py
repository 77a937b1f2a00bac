"""Workers that dial: who is let in, who is not, and how it begins again."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from inlay.base.errors import OverloadedError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Address
from inlay.messages.prompt import Tokens
from inlay.transport import ReceiveMemory, TcpPeer, dial
from inlay.transport.messages import Dial, FromWorker, Hello, Ready, ToWorker
from inlay.transport.reverse_dial import ReverseDial
from tests.transport.fleet import SECRET, Fleet, card_of, found, identity
from tests.transport.nats_server import NatsServer
from tests.transport.test_conformance import collect, ids, make_request


@pytest.fixture
async def fleet(nats_server: NatsServer) -> AsyncIterator[Fleet]:
    fleet = Fleet(nats_server)
    yield fleet
    await fleet.close()


@pytest.fixture
async def reception() -> AsyncIterator[ReverseDial]:
    reception = ReverseDial(SECRET, ReceiveMemory(1 << 20), identity())
    await reception.open("127.0.0.1", "127.0.0.1", 0)
    yield reception
    await reception.close()
    await asyncio.sleep(0.05)


async def test_a_worker_dials_every_frontend_and_again_after_a_cut(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    worker = await fleet.worker(EchoEngine(echo_settings, SECRET), dials=True)
    for plane in [await fleet.frontend(listens=True) for _ in range(2)]:
        async with asyncio.timeout(90):
            [before] = await found(plane)
            assert (card_of(plane).address, card_of(plane).dials) == (None, True)
            assert ids(await collect(before.send(make_request("a", Tokens([3]), max_tokens=2))))
            await worker.cut()
            while before in plane.workers():
                await plane.changed()
            [after] = await found(plane)
            assert ids(await collect(after.send(make_request("b", Tokens([3]), max_tokens=2))))


async def test_a_frontend_that_does_not_listen_says_what_is_missing(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    worker = await fleet.worker(EchoEngine(echo_settings, SECRET), dials=True)
    plane = await fleet.frontend()
    async with asyncio.timeout(90):
        while not plane.unavailable():
            await plane.changed()
    assert "--transport-host" in plane.unavailable()[worker.member.id]


async def test_a_frontend_cannot_make_a_worker_dial_another(
    fleet: Fleet, echo_settings: EngineSettings
) -> None:
    await fleet.worker(EchoEngine(echo_settings, SECRET))
    plane = await fleet.frontend()
    [worker] = await found(plane)
    worker._say(Dial(Address("127.0.0.1", 1, bytes(32)), b"x"))  # type: ignore[attr-defined]
    async with asyncio.timeout(90):
        while worker in plane.workers():
            await plane.changed()


async def _knock(address: Address, *said: object) -> TcpPeer[ToWorker]:
    connection = await dial(address, SECRET, ToWorker, ReceiveMemory(1 << 20))
    for message in said:
        connection.send(message)
    return connection


async def test_only_an_invited_connection_comes_in_and_a_token_is_good_once(
    reception: ReverseDial, echo_settings: EngineSettings
) -> None:
    engine = EchoEngine(echo_settings, SECRET)
    await engine.start()
    invited: asyncio.Future[tuple[Address, bytes]] = asyncio.get_running_loop().create_future()
    calling = asyncio.create_task(
        reception.call(lambda address, token: invited.set_result((address, token)))
    )
    async with asyncio.timeout(90):
        address, token = await invited
        strangers = [
            await _knock(address, Hello(bytes(16))),
            await _knock(address, Ready(engine.card)),
        ]
        for stranger in strangers:
            with pytest.raises(EOFError):
                await stranger.receive()
        worker = await _knock(address, Hello(token), Ready(engine.card))
        connection: TcpPeer[FromWorker] = await calling
        assert await connection.receive() == Ready(engine.card)
        again = await _knock(address, Hello(token))
        with pytest.raises(EOFError):
            await again.receive()
    for end in (worker, connection):
        end.abort()
    await engine.close()


async def test_a_worker_that_does_not_come_is_reported_in_time(
    reception: ReverseDial, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.transport.reverse_dial.HANDSHAKE_SECONDS", 0.2)
    with pytest.raises(OverloadedError, match="did not connect"):
        await reception.call(lambda address, token: None)
    assert not reception._invited
