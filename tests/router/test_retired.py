"""What rollouts replaced is forgotten: weights at once, names when nobody brings them back."""

import asyncio
import gc
import weakref
from collections.abc import Mapping, Sequence
from random import Random

import pytest
from msgspec.structs import replace

from inlay.base.errors import NotFoundError, OverloadedError
from inlay.messages.prompt import Buffer
from inlay.messages.routing import FrontendLoad, KvSnapshot
from inlay.router.fleet import MAX_GONE, RETIRED_SECONDS, Catalog, Fleet
from inlay.router.router import Router
from inlay.router.settings import RouterSettings
from inlay.router.snapshot import Pool
from inlay.transport.api import Worker
from tests.router.scripted_plane import SMALL, Answering, ScriptedPlane, quiet
from tests.router.standing import CARD, Standing
from tests.router.test_pool import blocks


class Cluster:
    """A plane of workers that come and go, whose caches are followed."""

    def __init__(self) -> None:
        self.there: list[Worker] = []

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def workers(self) -> Sequence[Worker]:
        return list(self.there)

    def unavailable(self) -> Mapping[str, str]:
        return {}

    async def changed(self) -> None:
        raise NotImplementedError

    def room(self, num_bytes: int) -> memoryview | None:
        return None

    def listen(self, events: object, loads: object) -> None:
        pass

    def publish(self, load: FrontendLoad) -> None:
        pass

    async def kv_snapshot(self, worker_id: str) -> KvSnapshot:
        return KvSnapshot(0, Buffer(b""))


async def test_after_many_rollouts_only_the_pool_that_serves_is_left() -> None:
    cluster = Cluster()
    fleet = Fleet(cluster, RouterSettings(), Random(1))
    pools: list[weakref.ref[Pool]] = []
    for rollout in range(50):
        card = replace(CARD, weights_id=str(rollout), kv_events=True)
        # The new ones are there before the old ones go.
        cluster.there += [Standing(f"{rollout}-{n}", card) for n in range(2)]
        assert len(fleet.workers()) in (2, 4)
        pool = fleet.pool(card)
        pools.append(weakref.ref(pool))
        member = next(iter(pool.members.values()))
        fleet.sent(pool, member, blocks(rollout, 100))
        del cluster.there[:-2]
        assert len(fleet.workers()) == 2
        if fleet._peers is not None:
            fleet._peers.tell()
        await asyncio.sleep(0.001)
    assert set(fleet.loads()) == {worker.id for worker in cluster.there}
    del pool, member
    gc.collect()
    assert [at for at, known in enumerate(pools) if known() is not None] == [49]
    await fleet.close()


class Named:
    """A catalog of workers, and a clock."""

    def __init__(self, *names: str) -> None:
        self.now = 0.0
        self.workers: list[Worker] = []
        self.catalog = Catalog(lambda: self.workers, dict, lambda: self.now)
        self.serve(*names)

    def serve(self, *names: str) -> None:
        self.workers = [Standing(f"of-{name}", replace(CARD, name=name)) for name in names]

    @property
    def shown(self) -> list[str]:
        return [card.name for card in self.catalog.models()]


def test_a_model_that_is_gone_is_served_no_more_once_its_time_is_over() -> None:
    named = Named("old", "new")
    assert named.shown == ["old", "new"]
    named.serve("new")
    named.now = RETIRED_SECONDS - 1
    assert named.shown == ["old", "new"]  # since it was looked at last
    named.now += RETIRED_SECONDS - 1
    assert named.shown == ["old", "new"]
    named.now += 1
    with pytest.raises(NotFoundError, match=r"`old` does not exist; served: `new`$"):
        named.catalog.base("old")
    assert named.shown == ["new"]
    named.serve("new", "old")
    assert named.shown == ["new", "old"]


def test_a_model_that_comes_back_in_time_has_all_its_time_again() -> None:
    named = Named("m", "other")
    assert named.shown == ["m", "other"]
    for _ in range(3):
        named.serve("other")
        assert named.shown == ["m", "other"]
        named.now += RETIRED_SECONDS - 1
        assert named.shown == ["m", "other"]
        named.serve("m", "other")
        assert named.shown == ["m", "other"]


def test_where_nothing_else_is_served_a_model_is_waited_for_without_end() -> None:
    named = Named("m")
    assert named.shown == ["m"]
    named.serve()
    assert named.shown == ["m"]
    named.now = 100 * RETIRED_SECONDS
    assert named.shown == ["m"]
    assert named.catalog.base("m").name == "m"
    named = Named()
    with pytest.raises(OverloadedError, match="no worker is ready"):
        named.catalog.base("m")


def test_of_many_names_in_a_short_time_the_last_are_remembered() -> None:
    named = Named()
    for rollout in range(MAX_GONE + 50):
        named.serve(f"m-{rollout}")
        assert named.shown[-1] == f"m-{rollout}"
    assert len(named.shown) == MAX_GONE + 1
    assert named.shown[0] == "m-49"


def test_names_that_nobody_serves_are_not_remembered() -> None:
    named = Named("m")
    assert named.catalog.base("m").name == "m"
    remembered = len(named.catalog._called)
    for number in range(100):
        with pytest.raises(NotFoundError):
            named.catalog.draw(f"x-{number}", 0.5)
        assert not named.catalog.shares(f"y-{number}")
    assert len(named.catalog._called) == remembered


async def test_a_model_that_came_and_went_while_nobody_asked_is_known() -> None:
    plane = ScriptedPlane()
    router = Router(plane)
    await router.start()
    for there in ([Answering("a")], []):
        plane.there[:] = there
        plane.tell()
        await quiet()
    with pytest.raises(NotFoundError):
        router.model("no")
    assert router.model(SMALL.name).card == SMALL
    await router.close()
