"""What was not used for longest gives way, and the sizes always add up."""

from collections import OrderedDict

from hypothesis import given
from hypothesis import strategies as st

from inlay.base.lru import LruBytes

ACTIONS = st.lists(
    st.tuples(st.sampled_from(["put", "get", "peek", "pop"]), st.integers(0, 7), st.integers(0, 9))
)


@given(limit=st.integers(0, 20), actions=ACTIONS)
def test_it_holds_what_was_used_last_within_its_limit(
    limit: int, actions: list[tuple[str, int, int]]
) -> None:
    gone: list[tuple[int, int]] = []
    cache: LruBytes[int, int] = LruBytes(
        limit, lambda _, value: value, lambda key, value: gone.append((key, value))
    )
    model: OrderedDict[int, int] = OrderedDict()
    evicted: list[tuple[int, int]] = []
    for action, key, size in actions:
        if action == "put":
            model.pop(key, None)
            if size <= limit:
                model[key] = size
            while sum(model.values()) > limit:
                evicted.append(model.popitem(last=False))
            assert cache.put(key, size) == (size <= limit)
        elif action == "get":
            assert cache.get(key) == model.get(key)
            if key in model:
                model.move_to_end(key)
        elif action == "peek":
            assert cache.peek(key) == model.get(key)
        else:
            assert cache.pop(key) == model.pop(key, None)
        assert list(cache) == list(model)
        assert cache.used == sum(model.values()) <= limit
        assert cache.oldest() == next(iter(model.items()), None)
    assert gone == evicted
    assert cache.evictions == len(gone)
    assert all(key in cache for key in model)
    assert len(cache) == len(model)


def test_without_sizes_it_holds_as_many_as_its_limit() -> None:
    cache: LruBytes[str, str] = LruBytes(2)
    for key in "abac":
        cache.put(key, key)
    assert list(cache) == ["a", "c"]
