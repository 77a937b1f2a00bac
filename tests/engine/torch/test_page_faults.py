"""Connections that are cut, and processes that are killed or hang, while pages are on their way.

The asker computes the rest; the giver holds nothing for it.
"""

import asyncio
import gc
import math
import os
import signal
import sys
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, cast

import msgspec
import pytest
from msgspec.structs import replace

from inlay.base.address import Address
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import PAGES, Payload, Request, Source
from inlay.transport import connection, wire
from inlay.transport.connection import TcpPeer
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.peers import PeerConnections
from inlay.transport.tls import load_identity, make_certificate
from inlay.worker.host import EngineHost
from tests.engine.conformance import SECRET, ids, make_request
from tests.engine.torch.page_giver import PROMPT, Ready
from tests.engine.torch.test_page_exchange import (
    FROM_PEER,
    WINDOWED,
    Always,
    Direct,
    answers,
    one_page_at_a_time,
    settings,
    started,
)
from tests.models import make, tiny

BEFORE = 3
"""Pages that come before the fault."""


class Patient(Always):
    """A second of patience."""

    def timeout_for(self, positions: int, deadline: float | None) -> float:
        return 1.0


class Struck:
    """`PeerWorkers` over real connections; `pid` gets `signum` when one more page is asked for."""

    def __init__(self, peers: PeerConnections, pid: int, signum: signal.Signals) -> None:
        self._peers = peers
        self._pid = pid
        self._signum = signum
        self.num_answers = 0
        self.struck = False

    async def payloads(
        self, address: Address, request: Request, within: float | None = None
    ) -> Sequence[Payload]:
        if self.num_answers >= BEFORE and not self.struck:
            self.struck = True
            os.kill(self._pid, self._signum)
        found = await self._peers.payloads(address, request, within)
        self.num_answers += 1
        return found


class Cut:
    """Cuts the connections of this process once both ends have written so often together."""

    def __init__(self) -> None:
        self.num_written = 0
        self.after = math.inf

    def written(self) -> bool:
        """Return True if the next message is not to leave."""
        self.num_written += 1
        return self.num_written > self.after


class Wire:
    """A transport that ends its connection in place of a message."""

    def __init__(self, transport: asyncio.Transport, owner: TcpPeer[Any], cut: Cut) -> None:
        self._transport = transport
        self._owner = owner
        self._cut = cut

    def __getattr__(self, name: str) -> Any:
        return getattr(self._transport, name)

    def write(self, data: bytes) -> None:
        self.writelines([data])

    def writelines(self, pieces: Sequence[bytes]) -> None:
        if self._cut.written():
            self._owner.abort()
        else:
            self._transport.writelines(pieces)


@pytest.mark.thorough
@pytest.mark.parametrize(
    ("way", "model"), [("neighbours", "llama"), ("tls", "llama"), ("neighbours", "windows")]
)
async def test_a_connection_that_is_cut_after_any_message_changes_no_output(
    way: str, model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_page_at_a_time(monkeypatch)
    # A page comes in several chunks, each a message of its own.
    monkeypatch.setattr(wire, "CHUNK_BYTES", 512)
    monkeypatch.setattr(connection, "WRITE_BYTES", 1)
    cut, made = Cut(), TcpPeer.connection_made

    def watched(owner: TcpPeer[Any], transport: asyncio.BaseTransport) -> None:
        made(owner, cast("Any", Wire(cast("asyncio.Transport", transport), owner, cut)))

    monkeypatch.setattr(TcpPeer, "connection_made", watched)
    prompt = Prompt.of(Tokens(ids(1, 70)))
    # With windows in other layers, pages of several groups come, those of windows last.
    config = settings(tiny("llama") if model == "llama" else make("qwen3", tmp_path, **WINDOWED))
    async with started(config, config) as (giving, asking):
        truth, _ = await answers(giving, make_request("truth", prompt))
        identity = load_identity(make_certificate())
        endpoint = Endpoint(
            EngineHost(giving), SECRET, identity, EmbedsCache(0), neighbours=way == "neighbours"
        )
        sources = (Source(PAGES, (await endpoint.open("127.0.0.1", "127.0.0.1", 0),)),)

        async def cached(after: float) -> int:
            """Cached positions of a request whose connection is cut after so many messages."""
            cut.num_written, cut.after = 0, after
            await asking.reset_prefix_cache()
            peers = PeerConnections(SECRET)
            asking.use_peers(peers)
            output, found = await answers(asking, make_request("r", prompt, sources=sources))
            await peers.close()
            assert output == truth
            exchange = giving._exchange
            assert exchange is not None
            async with asyncio.timeout(60):
                while exchange._answers or exchange._giving or endpoint._serving:
                    assert giving.stats().blocks_used == 0
                    await asyncio.sleep(0.002)
                    gc.collect()
            assert giving.stats().blocks_used == 0
            return found

        assert await cached(math.inf) == 64
        # Both ends prove themselves, then four pages are asked for.
        recorded = cut.num_written
        assert recorded > (12 if way == "neighbours" else 24)
        found = [await cached(after) for after in range(recorded)]
        # What came before the cut is of use, of windows where all groups reach as far.
        ends = {0, 16, 32, 48} if model == "llama" else {0}
        assert ends <= set(found) <= {0, 16, 32, 48, 64}
        assert found[:4] == [0] * 4
        await endpoint.close()


class SlowReader:
    """Has one end of a connection read a few hundred bytes at a time, ten times a second."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.owner: TcpPeer[Any] | None = None
        get_buffer, updated = TcpPeer.get_buffer, TcpPeer.buffer_updated

        def some(owner: TcpPeer[Any], hint: int) -> memoryview:
            whole = get_buffer(owner, hint)
            return whole[:256] if owner is self.owner else whole

        def then_rest(owner: TcpPeer[Any], count: int) -> None:
            updated(owner, count)
            if owner is self.owner and owner._transport is not None:
                owner._transport.pause_reading()
                asyncio.get_running_loop().call_later(0.1, owner._transport.resume_reading)

        monkeypatch.setattr(TcpPeer, "get_buffer", some)
        monkeypatch.setattr(TcpPeer, "buffer_updated", then_rest)


@pytest.mark.parametrize("way", ["neighbours", "tls"])
async def test_a_slow_reader_delays_nobody_and_holds_nothing_afterwards(
    way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_page_at_a_time(monkeypatch)
    monkeypatch.setattr(wire, "CHUNK_BYTES", 2048)
    reader = SlowReader(monkeypatch)
    prompt, config = Prompt.of(Tokens(ids(1, 400))), settings(tiny("llama"))
    async with started(config, config, config) as (giving, slow, other):
        truth, _ = await answers(giving, make_request("truth", prompt))
        identity = load_identity(make_certificate())
        endpoint = Endpoint(
            EngineHost(giving), SECRET, identity, EmbedsCache(0), neighbours=way == "neighbours"
        )
        sources = (Source(PAGES, (await endpoint.open("127.0.0.1", "127.0.0.1", 0),)),)
        exchanges = [engine._exchange for engine in (giving, slow)]
        assert exchanges[0] is not None
        assert exchanges[1] is not None
        exchanges[1].price = Patient()
        both = PeerConnections(SECRET), PeerConnections(SECRET)
        for engine, peers in zip((slow, other), both, strict=True):
            engine.use_peers(peers)
        # It has its connection.
        early = make_request("early", Prompt.of(Tokens(ids(2, 40))), sources=sources)
        await answers(slow, early)
        (peer,) = both[0]._peers.values()
        reader.owner = cast("TcpPeer[Any]", peer.link._carrier)
        asked = asyncio.create_task(answers(slow, make_request("slow", prompt, sources=sources)))
        while not exchanges[0]._answers:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)
        found = await answers(other, make_request("other", prompt, sources=sources))
        assert found == (truth, 384)
        assert not asked.done()
        assert giving.stats().blocks_used == 0
        output, cached = await asked
        assert output == truth
        assert cached < 384
        async with asyncio.timeout(60):
            while exchanges[0]._answers or exchanges[0]._giving:
                assert giving.stats().blocks_used == 0
                await asyncio.sleep(0.002)
                gc.collect()
        assert giving.stats().blocks_used == 0
        for peers in both:
            await peers.close()
        await endpoint.close()


@asynccontextmanager
async def giver(
    directory: str, way: str
) -> AsyncIterator[tuple[asyncio.subprocess.Process, Ready]]:
    module = "tests.engine.torch.page_giver"
    process = await asyncio.create_subprocess_exec(
        sys.executable, "-m", module, directory, way, stdout=asyncio.subprocess.PIPE
    )
    try:
        assert process.stdout is not None
        yield process, msgspec.json.decode(await process.stdout.readline(), type=Ready)
    finally:
        if process.returncode is None:
            process.kill()
        await process.wait()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["neighbours", "tcp"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_a_giver_that_ends_or_hangs_in_the_middle_changes_no_output(
    signum: signal.Signals, way: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    one_page_at_a_time(monkeypatch)
    directory, peers = tiny("llama"), PeerConnections(SECRET)
    async with (
        started(settings(directory)) as (asking,),
        giver(str(directory), way) as (process, ready),
    ):
        assert asking._exchange is not None
        asking._exchange.price = Patient()
        struck = Struck(peers, process.pid, signum)
        asking.use_peers(struck)
        sources = (Source(PAGES, (ready.address,)),)
        output, cached = await answers(asking, make_request("r", PROMPT, sources=sources))
        assert struck.struck
        assert output == ready.output
        # What came before is of use, and the engine computes the rest.
        assert BEFORE * 16 <= cached < (len(PROMPT) - 1) // 16 * 16
        # The next request of another tenant, with that peer still named, is answered too.
        request = replace(make_request("next", PROMPT, sources=sources), salt="tenant")
        assert (await answers(asking, request))[0] == ready.output
        await peers.close()


@pytest.mark.slow
@pytest.mark.parametrize("way", ["neighbours", "tcp"])
@pytest.mark.parametrize("signum", [signal.SIGKILL, signal.SIGSTOP], ids=["killed", "frozen"])
async def test_an_asker_that_ends_or_hangs_in_the_middle_holds_nothing(
    signum: signal.Signals, way: str
) -> None:
    config = settings(tiny("llama"))
    async with started(config, config) as (giving, asking):
        truth, _ = await answers(giving, make_request("truth", PROMPT))
        direct = Direct(peer=giving)
        asking.use_peers(direct)
        await answers(asking, make_request("first", PROMPT, sources=FROM_PEER))
        identity = load_identity(make_certificate())
        endpoint = Endpoint(
            EngineHost(giving), SECRET, identity, EmbedsCache(0), neighbours=way == "neighbours"
        )
        address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
        given = (msgspec.msgpack.encode(part).hex() for part in (address, direct.asked[0]))
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "tests.engine.torch.page_asker",
            *given,
            stdout=asyncio.subprocess.PIPE,
        )
        try:
            assert process.stdout is not None
            assert (await process.stdout.readline()).startswith(b"asked")
            process.send_signal(signum)
            exchange = giving._exchange
            assert exchange is not None
            # No page is held for it at any time, and what it had asked for is given up with its
            # connection.
            async with asyncio.timeout(60):
                while exchange._answers or exchange._giving or endpoint._serving:
                    assert giving.stats().blocks_used == 0
                    await asyncio.sleep(0.02)
                    gc.collect()
        finally:
            if process.returncode is None:
                process.kill()
            await process.wait()
        assert giving.stats().blocks_used == 0
        # Others are given pages as before.
        await asking.reset_prefix_cache()
        request = make_request("next", PROMPT, sources=FROM_PEER)
        assert await answers(asking, request) == (truth, (len(PROMPT) - 1) // 16 * 16)
        await endpoint.close()
