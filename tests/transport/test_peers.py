"""A worker asks others for payloads over connections of its own: proved, shared, bounded."""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from msgspec.structs import replace

from inlay.base.address import Address
from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Emit, Pooling, Request, Task
from inlay.transport import peers as peers_module
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.peers import PeerConnections
from inlay.worker.host import EngineHost
from tests.transport.fleet import SECRET, identity

BOUND = 60
"""Seconds within which everything must have come to an end: nothing hangs."""


class Slow(EchoEngine):
    """Keeps what it is asked until it is let go."""

    def __init__(self, settings: EngineSettings) -> None:
        super().__init__(settings, SECRET)
        self.held: dict[str, tuple[Request, Emit]] = {}
        self.came = asyncio.Event()

    def submit(self, request: Request, emit: Emit) -> None:
        self.held[request.id] = request, emit
        self.came.set()

    def abort(self, request_id: str) -> None:
        request, emit = self.held.pop(request_id)
        emit(request.end("abort"))


class Asked:
    """A worker that others ask."""

    def __init__(self, engine: EchoEngine, endpoint: Endpoint, address: Address) -> None:
        self.engine = engine
        self.endpoint = endpoint
        self.address = address

    def cut(self) -> None:
        for connection in self.endpoint._serving.values():
            connection.abort()


@asynccontextmanager
async def asked(engine: EchoEngine, secret: Secret = SECRET) -> AsyncIterator[Asked]:
    await engine.start()
    cache = EmbedsCache(0)
    endpoint = Endpoint(EngineHost(engine, embeds_cache=cache), secret, identity(), cache)
    address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
    try:
        yield Asked(engine, endpoint, address)
    finally:
        await endpoint.close()
        await engine.close()


@pytest.fixture
async def peers() -> AsyncIterator[PeerConnections]:
    found = PeerConnections(SECRET)
    yield found
    async with asyncio.timeout(BOUND):
        await found.close()


def embedding(id_: str, count: int = 3) -> Request:
    prompt = Prompt.of(Tokens(range(1, count + 1)))
    return Request(id=id_, task=Task.EMBED, prompts=(prompt,), params=Pooling())


async def until(done: Callable[[], Any]) -> None:
    while not done():  # noqa: ASYNC110  # nobody tells
        await asyncio.sleep(0.01)


async def test_payloads_come_over_one_connection_and_their_memory_is_given_back(
    echo_settings: EngineSettings, peers: PeerConnections
) -> None:
    async with asked(EchoEngine(echo_settings, SECRET)) as peer:
        together = await asyncio.gather(
            *(peers.payloads(peer.address, embedding(f"same-{number % 2}")) for number in range(8))
        )
        assert {payload.data.view.tobytes() for (payload,) in together} != {b""}
        assert len(peers) == len(peer.endpoint._serving) == 1
        del together
        await until(lambda: peers._memory.used == 0)


async def test_another_certificate_or_another_secret_is_no_peer(
    echo_settings: EngineSettings, peers: PeerConnections
) -> None:
    async with (
        asked(EchoEngine(echo_settings, SECRET)) as peer,
        asked(EchoEngine(echo_settings, SECRET), Secret(bytes(31) + b"x")) as stranger,
    ):
        forged = replace(peer.address, fingerprint=bytes(32))
        with pytest.raises(OverloadedError, match="another certificate"):
            await peers.payloads(forged, embedding("forged"))
        with pytest.raises(OverloadedError, match="no connection"):
            await peers.payloads(stranger.address, embedding("strange"))
        assert len(peers) == 0
        assert len(await peers.payloads(peer.address, embedding("own"))) == 1


async def test_who_leaves_or_waits_too_long_stops_the_request_at_the_peer(
    echo_settings: EngineSettings, peers: PeerConnections
) -> None:
    engine = Slow(echo_settings)
    async with asked(engine) as peer:
        asking = asyncio.create_task(peers.payloads(peer.address, embedding("one")))
        await engine.came.wait()
        asking.cancel()
        await until(lambda: not engine.held)
        with pytest.raises(OverloadedError, match="has not answered for"):
            await peers.payloads(peer.address, embedding("two"), 0.2)
        await until(lambda: not engine.held)
        (one,) = peers._peers.values()
        await until(lambda: not one.link._streams)
        assert one.uses == 0


async def test_a_peer_that_is_lost_ends_what_it_was_asked_and_is_dialled_again(
    echo_settings: EngineSettings, peers: PeerConnections
) -> None:
    engine = Slow(echo_settings)
    async with asked(engine) as peer:
        asking = asyncio.create_task(peers.payloads(peer.address, embedding("one")))
        await engine.came.wait()
        peer.cut()
        with pytest.raises(OverloadedError, match="gone"):
            await asking
        await until(lambda: not engine.held and not len(peers))
        engine.came.clear()
        again = asyncio.create_task(peers.payloads(peer.address, embedding("two")))
        await engine.came.wait()
        again.cancel()


async def test_a_peer_answers_with_its_own_error(
    echo_settings: EngineSettings, peers: PeerConnections
) -> None:
    async with asked(EchoEngine(echo_settings, SECRET)) as peer:
        wrong = replace(embedding("encode"), task=Task.ENCODE)
        with pytest.raises(InvalidRequestError, match="does not encode media"):
            await peers.payloads(peer.address, wrong)


async def test_connections_that_nobody_uses_are_closed(
    echo_settings: EngineSettings, peers: PeerConnections, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(peers_module, "MAX_PEERS", 1)
    engine = Slow(echo_settings)
    async with asked(engine) as slow, asked(EchoEngine(echo_settings, SECRET)) as peer:
        asking = asyncio.create_task(peers.payloads(slow.address, embedding("held")))
        await engine.came.wait()
        with pytest.raises(OverloadedError, match="1 other workers are being asked"):
            await peers.payloads(peer.address, embedding("more"))
        asking.cancel()
        await until(lambda: not engine.held)
        assert len(await peers.payloads(peer.address, embedding("more"))) == 1
        assert list(peers._peers) == [peer.address]
        monkeypatch.setattr(peers_module, "IDLE_SECONDS", 0.0)
        await peers.payloads(peer.address, embedding("last"))
        await until(lambda: not len(peers) and not peer.endpoint._serving)


async def test_a_caller_that_leaves_while_it_is_dialled_takes_nobody_along(
    echo_settings: EngineSettings, peers: PeerConnections
) -> None:
    async with asked(EchoEngine(echo_settings, SECRET)) as peer:
        first = asyncio.create_task(peers.payloads(peer.address, embedding("first")))
        second = asyncio.create_task(peers.payloads(peer.address, embedding("second")))
        await asyncio.sleep(0)
        assert len(peers._dialling) == 1
        first.cancel()
        assert len(await second) == 1
        assert len(peer.endpoint._serving) == 1
