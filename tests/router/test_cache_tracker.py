"""Cache events of workers are followed.

In order, over gaps, lost answers and new workers.
"""

import asyncio
from random import Random

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.errors import OverloadedError
from inlay.messages.prompt import Buffer
from inlay.messages.routing import (
    Cleared,
    KvEvent,
    KvEvents,
    KvSnapshot,
    Priced,
    Removed,
    Stored,
    WorkerLoad,
)
from inlay.router import peers as caches
from inlay.router.index import keys_of
from inlay.router.peers import CacheTracker
from inlay.router.settings import RouterSettings
from inlay.router.snapshot import Pool
from tests.router.standing import CARD, Standing

KEYS = [Random(n).randbytes(8) for n in range(12)]


class Teller:
    """A worker with a cache.

    Every change is a numbered message, some of which are lost on the way.
    """

    def __init__(self) -> None:
        self.sequence = 0
        self.held: set[bytes] = set()
        self.asked = 0
        self.failing = 0
        self.worker = Standing("w", msgspec.structs.replace(CARD, kv_events=True))

    def tell(self, event: KvEvent) -> KvEvents:
        self.sequence += 1
        if isinstance(event, Cleared):
            self.held.clear()
        elif not isinstance(event, Priced):
            keys = {event.keys[at : at + 8] for at in range(0, len(event.keys), 8)}
            self.held = self.held | keys if isinstance(event, Stored) else self.held - keys
        return KvEvents(self.sequence, (event,))

    async def snapshot(self, worker_id: str) -> KvSnapshot:
        self.asked += 1
        if self.failing:
            self.failing -= 1
            raise OverloadedError("not now")
        taken = KvSnapshot(self.sequence, Buffer(b"".join(sorted(self.held))))
        await asyncio.sleep(0)
        return taken


class Following:
    """A pool that follows one teller."""

    def __init__(self, teller: Teller) -> None:
        given = RouterSettings()
        self.pool = Pool(given)
        self.caches = CacheTracker(teller.snapshot)
        (member,) = self.pool.take([teller.worker], lambda _: WorkerLoad())
        self.member = member
        self.caches.follow(self.pool, member)

    def known(self) -> set[bytes]:
        index = self.pool.index
        return {key for key in KEYS if index.overlap(keys_of(key))[self.member.reported]}


async def settled(turns: int = 12) -> None:
    for _ in range(turns):
        await asyncio.sleep(0)


events = st.one_of(
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=4).map(
        lambda keys: Stored(b"".join(keys))
    ),
    st.lists(st.sampled_from(KEYS), min_size=1, max_size=4).map(
        lambda keys: Removed(b"".join(keys))
    ),
    st.just(Cleared()),
)


@settings(deadline=None)
@given(st.lists(st.tuples(events, st.booleans(), st.booleans()), max_size=25))
def test_after_the_next_message_that_arrives_everything_is_known_whatever_was_lost(
    told: list[tuple[KvEvent, bool, bool]],
) -> None:
    async def run() -> None:
        teller = Teller()
        following = Following(teller)
        for event, arrives, time_passes in told:
            message = teller.tell(event)
            if arrives:
                following.caches.take("w", message)
            if time_passes:
                await settled()
        following.caches.take("w", teller.tell(Stored(KEYS[0])))
        await settled(40)
        assert following.known() == teller.held
        await following.caches.close()

    asyncio.run(run())


async def test_a_new_frontend_learns_what_was_cached_before_it_came() -> None:
    teller = Teller()
    teller.tell(Stored(b"".join(KEYS[:5])))
    following = Following(teller)
    await settled()
    assert following.known() == set(KEYS[:5])
    following.caches.take("w", teller.tell(Stored(KEYS[5])))
    assert following.known() == set(KEYS[:6])
    assert teller.asked == 1


async def test_a_message_that_comes_twice_changes_nothing() -> None:
    teller = Teller()
    following = Following(teller)
    await settled()
    stored, removed = teller.tell(Stored(KEYS[0])), teller.tell(Removed(KEYS[0]))
    for message in (stored, removed, stored):
        following.caches.take("w", message)
    assert following.known() == set()
    assert teller.asked == 1


async def test_a_worker_that_does_not_answer_is_asked_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caches, "RETRY_SECONDS", 0)
    teller = Teller()
    teller.failing = 3
    teller.tell(Stored(KEYS[0]))
    following = Following(teller)
    await settled(30)
    assert teller.asked == 4
    assert following.known() == {KEYS[0]}


async def test_a_worker_that_is_gone_is_asked_no_more(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(caches, "RETRY_SECONDS", 0)
    teller = Teller()
    teller.failing = 1000
    following = Following(teller)
    await settled()
    following.pool.take([], lambda _: WorkerLoad())
    await settled()
    asked = teller.asked
    await settled()
    assert teller.asked == asked < 1000
    following.caches.take("w", teller.tell(Stored(KEYS[0])))


@pytest.mark.parametrize("turns", [1, 2, 3])
async def test_a_worker_that_leaves_while_its_snapshot_comes_holds_nothing(
    turns: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(caches, "_AT_ONCE", 1)
    teller = Teller()
    teller.tell(Stored(b"".join(KEYS)))
    following = Following(teller)
    for _ in range(turns):
        await asyncio.sleep(0)
    following.pool.take([], lambda _: WorkerLoad())
    index = following.pool.index
    width = index.width
    await settled(40)
    assert index.width == width
    assert not any(index.overlap(keys_of(key)).any() for key in KEYS)


async def test_what_comes_while_a_snapshot_is_on_its_way_is_not_lost(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(caches, "_KEPT", 3)
    teller = Teller()
    following = Following(teller)
    for number in range(9):
        following.caches.take("w", teller.tell(Stored(KEYS[number])))
    await settled(40)
    following.caches.take("w", teller.tell(Removed(KEYS[0])))
    await settled(40)
    assert following.known() == set(KEYS[1:9])
