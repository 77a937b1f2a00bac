"""A worker that fetches a prompt's pages from another answers as the one that computed them."""

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

from msgspec.structs import replace

from inlay.adapter.library import AdapterLibrary
from inlay.engine.api import Engine
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.engine import TorchEngine
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.routing import routing_chain
from inlay.router import Router
from inlay.router.index import keys_of
from inlay.router.resume import ResumingStream
from inlay.router.settings import RouterSettings
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.peers import PeerConnections
from inlay.worker.adapters import AdapterRegistry
from inlay.worker.host import EngineHost
from tests.engine import reference
from tests.engine.conformance import SECRET, ids, make_request
from tests.engine.torch.test_page_exchange import Always, settings
from tests.models import make, tiny
from tests.router.sending import IDLE
from tests.transport.conftest import nats_server
from tests.transport.fleet import Fleet, FleetWorker, found
from tests.transport.nats_server import NatsServer

__all__ = ["nats_server"]

COUNT = 24


class Pair:
    """A frontend, and two workers of one model that may ask each other."""

    def __init__(self, fleet: Fleet, plane: NatsPlane, settings: RouterSettings) -> None:
        self.fleet = fleet
        self.plane = plane
        self.router = Router(plane, settings, secret=SECRET)
        self.engines: dict[str, TorchEngine] = {}
        self.workers: dict[str, FleetWorker] = {}

    async def stream(self, prompt: Prompt, session: str, salt: str | None = None) -> ResumingStream:
        """A request of a session, which decides the worker."""
        request = make_request("r", prompt, COUNT, salt=salt)
        (stream,) = await self.router.send("m", [request], session=session)
        return stream

    async def answer(self, prompt: Prompt, session: str, salt: str | None = None) -> list[int]:
        found_ = await rest(await self.stream(prompt, session, salt))
        await self._told(prompt, salt)
        return found_

    async def _told(self, prompt: Prompt, salt: str | None) -> None:
        """Return once the frontend knows that some worker has all of the prompt."""
        pool = self.router._fleet.pool(next(iter(self.engines.values())).card)
        assert pool.card is not None
        keys = keys_of(routing_chain(prompt, pool.card, SECRET, salt=salt))

        def known() -> bool:
            held = pool.index.overlap(keys)
            return any(held[member.reported] == len(keys) for member in pool.members.values())

        while not known():  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)

    async def sessions(self) -> list[str]:
        """A session of each worker."""
        found_: dict[str, str] = {}
        number = 0
        while len(found_) < len(self.engines):
            stream = await self.stream(Prompt.of(Tokens(ids(number, 3))), str(number))
            found_.setdefault(stream.worker.partition(".")[0], str(number))
            await rest(stream)
            number += 1
        self.ids = list(found_)
        return list(found_.values())

    def fetched(self) -> list[int]:
        """Pages that each worker, in the order of `sessions`, has fetched."""
        stats = [self.engines[id_].stats() for id_ in self.ids]
        assert sum(one.kv_pages_given for one in stats) == sum(
            one.kv_pages_fetched for one in stats
        )
        return [one.kv_pages_fetched for one in stats]


async def rest(stream: ResumingStream) -> list[int]:
    return [id_ async for some in stream for output in some for id_ in output.token_ids]


@asynccontextmanager
async def pair(server: NatsServer, family: str = "llama") -> AsyncIterator[Pair]:
    config = settings(tiny(family), served_model_name=["m"])
    async with fleet_of(server, config, config) as both:
        yield both


def hosted(engine: Engine) -> EngineHost:
    library = AdapterLibrary(["file:///"], cache_dir=None, cache_bytes=1 << 20, max_bytes=1 << 20)
    return EngineHost(engine, AdapterRegistry(engine, library, SECRET, most=2, drain_seconds=5))


@asynccontextmanager
async def fleet_of(
    server: NatsServer, *configs: EngineSettings, router: RouterSettings | None = None
) -> AsyncIterator[Pair]:
    """A worker with each of some settings, in this order."""
    fleet = Fleet(server)
    plane = await fleet.frontend(SECRET)
    both = Pair(fleet, plane, router or RouterSettings())
    peers = []
    try:
        for config in configs:
            engine, own = TorchEngine(config, SECRET), PeerConnections(SECRET)
            peers.append(own)
            engine.use_peers(own)
            worker = await fleet.worker(engine, secret=SECRET, host=hosted)
            assert engine._exchange is not None
            engine._exchange.price = Always()
            both.engines[worker.worker.id] = engine
            both.workers[worker.worker.id] = worker
        await found(plane, len(configs))
        await both.router.start()
        yield both
    finally:
        await both.router.close()
        for own in peers:
            await own.close()
        await fleet.close()


async def test_a_prompt_that_another_worker_has_is_fetched_and_answered_alike(
    nats_server: NatsServer,
) -> None:
    directory, tokens = tiny("llama"), ids(1, 150)
    rows = reference.rows_of(reference.look_up(directory, tokens[30:90]))
    text = Prompt.of(Tokens(tokens))
    mixed = Prompt.of(Tokens(tokens[:30]), rows, Tokens(tokens[90:]))
    truth = reference.greedy(directory, text, COUNT)
    async with pair(nats_server) as both:
        first, second = await both.sessions()
        assert await both.answer(text, first) == truth
        assert both.fetched() == [0, 0]
        assert await both.answer(text, second) == truth
        assert both.fetched() == [0, 9]
        # The other way, with rows, for a tenant.
        assert await both.answer(mixed, second, "tenant") == truth
        assert await both.answer(mixed, first, "tenant") == truth
        assert both.fetched() == [9, 9]
        # Another tenant's pages are not asked for.
        assert await both.answer(mixed, first, "other") == truth
        assert await both.answer(mixed, first) == truth
        assert both.fetched() == [9, 9]
        assert set(both.router.loads().values()) == {IDLE}
        for engine in both.engines.values():
            assert engine.stats().blocks_used == 0


async def test_what_a_drained_worker_gives_up_goes_on_with_its_pages(
    nats_server: NatsServer, tmp_path: Path
) -> None:
    request = make_request("r", Prompt.of(Tokens(ids(3, 150))), 1000)
    directory = make("llama", tmp_path, max_position_embeddings=4096)
    config = settings(directory, served_model_name=["m"])
    async with fleet_of(nats_server, config, config) as both:
        # As one worker answers it, for another tenant.
        (truth,) = await both.router.send("m", [replace(request, salt="truth")])
        expected = await rest(truth)
        (stream,) = await both.router.send("m", [request])
        found_, drained = [], both.workers[stream.worker.partition(".")[0]]
        draining = None
        async for outputs in stream:
            found_ += [id_ for output in outputs for id_ in output.token_ids]
            if draining is None:
                draining = asyncio.create_task(drained.worker.drain(0))
        assert found_ == expected
        assert draining is not None
        await draining
        (fetched,) = [
            engine.stats().kv_pages_fetched
            for id_, engine in both.engines.items()
            if id_ != drained.worker.id
        ]
        # All of the prompt, and what was shown.
        assert fetched >= 150 // 16


async def test_a_draining_worker_still_gives_its_pages(nats_server: NatsServer) -> None:
    prompt = Prompt.of(Tokens(ids(3, 150)))
    async with pair(nats_server) as both:
        first, second = await both.sessions()
        truth = await both.answer(prompt, first)
        draining = both.workers[both.ids[0]].host
        draining._draining = True
        assert await both.answer(prompt, second) == truth
        assert both.fetched() == [0, 9]
