"""Two sets of weights under one name, over a real NATS server."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Rollout
from inlay.messages.prompt import Tokens
from inlay.router import Router
from inlay.transport.nats.member import Member
from inlay.transport.nats.presence import present_since
from inlay_stages.cards import StageCard
from tests.router.scripted_stages import GRAPH
from tests.router.test_graphs import UNLIKE
from tests.transport.fleet import SECRET, Fleet, FleetWorker
from tests.transport.nats_server import NatsServer
from tests.transport.test_conformance import make_request


class Changing:
    """A fleet whose workers have one name and the weights that a word says."""

    def __init__(self, fleet: Fleet, directory: Path) -> None:
        self.fleet = fleet
        self._directory = directory
        self.routers: list[Router] = []

    async def worker(self, weights: str, **asked: object) -> FleetWorker:
        path = self._directory / weights
        path.mkdir(exist_ok=True)
        sizes = {"vocab_size": 1000, "hidden_size": 64, "max_position_embeddings": 1000}
        (path / "config.json").write_text(json.dumps({**sizes, "weights": weights}))
        settings = EngineSettings.of(model=str(path), engine="echo", served_model_name=["m"])
        engine = EchoEngine(settings, SECRET)
        return await self.fleet.worker(engine, rollout=Rollout(**asked))  # type: ignore[arg-type]

    async def frontend(self) -> None:
        router = Router(await self.fleet.frontend(SECRET))
        await router.start()
        self.routers.append(router)

    async def until(self, done: Callable[[Router], bool]) -> None:
        """Return once it is true of all frontends."""
        async with asyncio.timeout(90):
            # Heartbeats of several planes: there is no one event to wait for.
            while not all(map(done, self.routers)):  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def serves(self, weights: str, num_workers: int) -> None:
        """Return once all frontends know so many workers and serve from these weights alone."""
        path = str(self._directory / weights)
        await self.until(
            lambda router: (
                len(router.ready()) == num_workers
                and router.model("m").card.path == path
                and router.choose("m").card.path == path
            )
        )
        for router in self.routers:
            (stream,) = await router.send("m", [make_request("a", Tokens([3]), max_tokens=1)])
            assert {one.id: one.card.path for one in router.ready()}[stream.worker] == path
            async for _ in stream:
                pass


@pytest.fixture
async def changing(nats_server: NatsServer, tmp_path: Path) -> AsyncIterator[Changing]:
    fleet = Fleet(nats_server)
    changing = Changing(fleet, tmp_path)
    yield changing
    for router in changing.routers:
        await router.close()
    await fleet.close()


async def test_a_newcomer_takes_nothing_until_it_has_more_workers_than_the_old(
    changing: Changing,
) -> None:
    await changing.frontend()
    old = await changing.worker("old")
    await changing.worker("new")
    await changing.serves("old", 2)
    await changing.frontend()  # which finds both at once
    await changing.serves("old", 2)
    await changing.worker("new")
    await changing.serves("new", 3)
    await old.close()
    await changing.serves("new", 2)


async def test_a_newcomer_takes_over_with_as_many_workers_as_it_asks_for(
    changing: Changing,
) -> None:
    for _ in range(2):
        await changing.frontend()
        await changing.worker("old")
    await changing.worker("new", min_workers=1)
    await changing.serves("new", 3)


async def test_an_old_worker_that_starts_again_takes_nothing_back(changing: Changing) -> None:
    await changing.frontend()
    old = await changing.worker("old")
    await changing.worker("new")
    await changing.serves("old", 2)
    await old.close()
    await changing.serves("new", 1)
    await changing.worker("old")
    await changing.serves("new", 2)
    await changing.frontend()
    await changing.serves("new", 2)


async def test_an_old_engine_that_starts_again_takes_nothing_back(changing: Changing) -> None:
    await changing.frontend()
    old = await changing.worker("old")
    await changing.worker("new")
    await changing.serves("old", 2)
    old.worker.away()
    await changing.serves("new", 1)
    old.worker.announce(old.host.card)
    await changing.serves("new", 2)


async def test_workers_hand_on_since_when_their_weights_are_there(changing: Changing) -> None:
    await changing.frontend()
    first = await changing.worker("old")
    await changing.worker("new")
    await changing.worker("old")
    await first.close()
    await changing.serves("old", 2)


async def test_a_canary_takes_its_share(changing: Changing, tmp_path: Path) -> None:
    for _ in range(2):
        await changing.frontend()
    await changing.worker("old")
    await changing.worker("new", weight=0.25)
    await changing.until(lambda router: len(router.ready()) == 2)
    for router in changing.routers:
        assert sorted(router.shares()["m"].values()) == [0.2, 0.8]
        drawn = {router.choose("m").card.path for _ in range(1000)}
        assert drawn == {str(tmp_path / "old"), str(tmp_path / "new")}


async def test_another_graph_of_the_same_weights_is_younger(changing: Changing) -> None:
    worker = await changing.worker("old")
    card = replace(worker.host.card, stage=StageCard(GRAPH, "reader"))
    worker.worker.announce(card)
    member = worker.member
    async with asyncio.timeout(90):
        # The worker stores its card by itself.
        stored = None
        while stored is None or stored[1].stage is None:
            stored = await member.cards.get(worker.worker.id)
    since = stored[1].rollout.since
    newcomer = await Member.join(changing.fleet.settings, "worker")
    assert await present_since(newcomer, card) == since > 0
    assert await present_since(newcomer, replace(card, stage=StageCard(UNLIKE, "reader"))) > since
    await newcomer.leave()
