"""What workers keep behind their caches counts in a choice, at its price."""

import pytest

from inlay.messages.digest import BLOCK_SIZE
from inlay.messages.prompt import Buffer
from inlay.messages.routing import KvEvents, KvSnapshot, KvTier, Priced, Removed, Stored
from inlay.router.index import Keys
from inlay.router.member import MAX_TIERS
from inlay.router.peers import CacheTracker
from tests.router.test_pool import Made, blocks, card

LONG = 64 * BLOCK_SIZE


class Told:
    """A pool of two workers, whose second tells of its cache and its tiers."""

    def __init__(self, page_size: int = BLOCK_SIZE) -> None:
        cards = [card(kv_events=True, block_size=page_size) for _ in range(2)]
        self.made = Made(*cards)
        self.pages = page_size // BLOCK_SIZE
        self.state = KvSnapshot(0, Buffer(b""))
        self.tracker = CacheTracker(self._snapshot)
        self._sequence = 0

    async def _snapshot(self, worker_id: str) -> KvSnapshot:
        return self.state if worker_id == "w1" else KvSnapshot(0, Buffer(b""))

    async def begin(self) -> None:
        for number in range(2):
            self.tracker.follow(self.made.pool, self.made.member(number))
        for followed in self.tracker._followed.values():
            assert followed.asking is not None
            await followed.asking

    def tell(self, *events: Stored | Removed | Priced) -> None:
        self._sequence += 1
        self.tracker.take("w1", KvEvents(self._sequence, events))

    def kept(self, keys: Keys) -> bytes:
        """The keys that a tier of such pages names."""
        return keys[self.pages - 1 :: self.pages].tobytes()

    def work(self, keys: Keys) -> int:
        """What the second worker has to do for a prompt of these blocks, beside the first."""
        part = self.made.placed(LONG, keys, only=["w1"]).part
        assert part.cached == 0
        assert self.made.placed(LONG, keys, only=["w0"]).part.work == LONG
        return part.work


@pytest.mark.parametrize("page_size", [16, 64])
async def test_what_a_tier_has_counts_at_its_price(page_size: int) -> None:
    told, keys = Told(page_size), blocks(1, 64)
    await told.begin()
    assert told.work(keys) == LONG
    told.tell(Stored(told.kept(keys), "host memory"))
    # Not measured: as a position that is fetched.
    assert told.work(keys) == LONG - int(0.8 * LONG)
    assert told.made.chosen(LONG, keys) == "w1"
    told.tell(Priced("host memory", 0.5))
    assert told.work(keys) == LONG // 2
    # It is asked where that is cheaper than another's queue.
    told.made.pool.change(told.made.member(1), requests=1, prefill=LONG // 4)
    assert told.made.chosen(LONG, keys) == "w1"
    told.made.pool.change(told.made.member(1), prefill=LONG // 2)
    assert told.made.chosen(LONG, keys) == "w0"
    # What is slower than computing is not read.
    told.tell(Priced("host memory", 2.0))
    assert told.work(keys) == LONG
    # The disk has all of it, at its own price.
    told.tell(Stored(told.kept(keys), "disk"), Priced("disk", 0.75))
    assert told.work(keys) == LONG // 4 * 3
    told.tell(Removed(told.kept(keys)[: 8 * (32 // told.pages)], "disk"))
    assert told.work(keys) == LONG


async def test_a_gap_ends_what_can_be_read() -> None:
    told, keys = Told(), blocks(1, 64)
    await told.begin()
    told.tell(Stored(keys[:32].tobytes(), "disk"), Stored(keys[33:].tobytes(), "disk"))
    told.tell(Priced("disk", 0.0))
    assert told.work(keys) == LONG - 32 * BLOCK_SIZE


async def test_a_snapshot_holds_the_tiers_and_a_worker_that_leaves_takes_them_along() -> None:
    told, keys = Told(), blocks(1, 64)
    told.state = KvSnapshot(
        0, Buffer(b""), (KvTier("host memory", Buffer(keys[:16].tobytes()), 0.25),)
    )
    await told.begin()
    assert told.work(keys) == LONG - 12 * BLOCK_SIZE
    # At a gap all is asked for again.
    told.state = KvSnapshot(7, Buffer(b""), (KvTier("disk", Buffer(keys.tobytes()), 0.5),))
    told.tracker.take("w1", KvEvents(7, ()))
    asking = told.tracker._followed["w1"].asking
    assert asking is not None
    await asking
    assert told.work(keys) == LONG // 2
    pool, member = told.made.pool, told.made.member(1)
    gone = told.made.workers.pop()
    told.made.take()
    assert not member.tiers
    assert not pool.index.overlap(keys).any()
    told.made.workers.append(gone)
    told.made.take()
    assert told.work(keys) == LONG
    await told.tracker.close()


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_worker_that_names_any_number_of_tiers_takes_a_few_places(
    at_once: bool, caplog: pytest.LogCaptureFixture
) -> None:
    told, keys = Told(), blocks(1, 64)
    names = ["disk", *map(str, range(50))]
    if at_once:
        tiers = tuple(KvTier(name, Buffer(keys[:16].tobytes()), 0.5) for name in names)
        told.state = KvSnapshot(0, Buffer(b""), tiers)
    await told.begin()
    if not at_once:
        for name in names:
            told.tell(Stored(keys[:16].tobytes(), name), Priced(name, 0.5))
    assert len(told.made.member(1).tiers) == MAX_TIERS
    assert told.work(keys) == LONG - 8 * BLOCK_SIZE
    # The rest stays unknown, and what is known goes on.
    told.tell(Priced("49", 0.0), Stored(keys.tobytes(), "49"), Removed(keys.tobytes(), "49"))
    assert told.work(keys) == LONG - 8 * BLOCK_SIZE
    told.tell(Priced("disk", 0.25))
    assert told.work(keys) == LONG - 12 * BLOCK_SIZE
    assert caplog.text.count("names over 8 tiers") == 1
