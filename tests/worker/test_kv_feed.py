"""What routers are told of a tier is what is there, the cache and the tiers before it included."""

from hypothesis import given
from hypothesis import strategies as st

from inlay.messages.routing import KEY_SIZE, Cleared, KvEvent, KvEvents, Priced, Removed, Stored
from inlay.worker.kv_feed import KvFeed

TIERS = ("", "host memory", "disk")

keys = st.lists(st.integers(0, 9), max_size=5, unique=True).map(
    lambda numbers: b"".join(number.to_bytes(KEY_SIZE, "little") for number in numbers)
)
events = st.one_of(
    st.builds(Stored, keys, st.sampled_from(TIERS)),
    st.builds(Removed, keys, st.sampled_from(TIERS)),
    st.builds(Priced, st.sampled_from(TIERS[1:]), st.floats(0, 9)),
    st.just(Cleared()),
)


def cut(data: "bytes | memoryview") -> set[bytes]:
    view = bytes(data)
    return {view[start : start + KEY_SIZE] for start in range(0, len(view), KEY_SIZE)}


class Router:
    """Applies what it is told."""

    def __init__(self) -> None:
        self.held: dict[str, set[bytes]] = {name: set() for name in TIERS}
        self.prices: dict[str, float] = {}
        self.sequence = 0

    def take(self, message: KvEvents) -> None:
        assert message.sequence == self.sequence + 1
        self.sequence = message.sequence
        for event in message.events:
            match event:
                case Stored(data, tier):
                    # A block that it has is not told again: an index counts those it had not.
                    assert tier == "" or not self.held[tier] & cut(data)
                    self.held[tier] |= cut(data)
                case Removed(data, tier):
                    assert tier == "" or self.held[tier] >= cut(data)
                    self.held[tier] -= cut(data)
                case Cleared():
                    self.held[""].clear()
                case Priced(tier, price):
                    self.prices[tier] = price


@given(st.lists(st.lists(events, min_size=1, max_size=4).map(tuple), max_size=12))
def test_a_router_knows_what_is_there(batches: list[tuple[KvEvent, ...]]) -> None:
    feed, router = KvFeed(), Router()
    feed.watch(router.take)
    own: dict[str, set[bytes]] = {name: set() for name in TIERS}
    order: list[str] = [""]
    for batch in batches:
        feed.take(batch)
        for event in batch:
            match event:
                case Stored(data, tier):
                    own[tier] |= cut(data)
                case Removed(data, tier):
                    own[tier] -= cut(data)
                case Cleared():
                    own[""].clear()
            if not isinstance(event, Cleared) and event.tier not in order:
                order.append(event.tier)
    reached: set[bytes] = set()
    for name in order:
        reached = reached | own[name]
        assert router.held[name] == reached, name
    taken = feed.snapshot()
    assert taken.sequence == router.sequence
    assert cut(taken.keys.view) == own[""]
    assert [kept.name for kept in taken.tiers] == order[1:]
    for kept in taken.tiers:
        assert cut(kept.keys.view) == router.held[kept.name]
        assert kept.price == router.prices.get(kept.name)
