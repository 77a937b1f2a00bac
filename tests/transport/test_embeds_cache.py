"""What is kept by name.

Never more than the bound, never another's bytes, never what was forgotten.
"""

import hypothesis.strategies as st
from hypothesis import given

from inlay.messages.prompt import Buffer
from inlay.transport.embeds_cache import (
    GONE_SECONDS,
    IDLE_SECONDS,
    EmbedsCache,
    EmbedsCacheStats,
)
from tests.store.making import Clock


def content(name: str) -> Buffer:
    """The bytes of a name; of names with other endings, of other sizes."""
    return Buffer(name.encode() * (1 + ord(name[-1]) % 3), name)


names = st.sampled_from([f"{prompt}/{part}" for prompt in ("p", "q", "r") for part in "abc"])
steps = st.lists(
    st.one_of(
        st.tuples(st.just("use"), names),
        st.tuples(st.just("forget"), st.sampled_from(["p", "q", "r"])),
        st.tuples(
            st.just("wait"), st.sampled_from(["1", str(GONE_SECONDS + 1), str(IDLE_SECONDS + 1)])
        ),
        st.tuples(st.just("clear"), st.just("")),
    ),
    max_size=40,
)


@given(steps, st.integers(0, 40))
def test_it_keeps_what_was_used_last_and_nothing_else(
    steps: list[tuple[str, str]], bound: int
) -> None:
    clock = Clock()
    kept = EmbedsCache(bound, clock)
    model: dict[str, float] = {}
    gone: dict[str, float] = {}
    for what, which in steps:
        if what == "use":
            whole = content(which)
            found = kept.find(which, len(whole))
            assert (found is not None) == (which in model)
            assert found is None or found == whole
            kept.use(which, found or whole, lasting=True, new=found is None)
            del found
            if len(whole) <= bound and which[0] not in gone:
                model.pop(which, None)
                model[which] = clock.now
                while sum(len(content(name)) for name in model) > bound:
                    del model[next(iter(model))]
            del whole
        elif what == "forget":
            kept.forget(which)
            gone[which] = clock.now
            model = {name: at for name, at in model.items() if name[0] != which}
        elif what == "clear":
            kept.clear()
            model.clear()
        else:
            clock.now += float(which)
            kept.tick()
            gone = {name: at for name, at in gone.items() if clock.now - at <= GONE_SECONDS}
            model = {name: at for name, at in model.items() if clock.now - at <= IDLE_SECONDS}
        assert kept.stats.kept_bytes == sum(len(content(name)) for name in model) <= bound
    for name in (f"{prompt}/{part}" for prompt in "pqr" for part in "abc"):
        assert (kept.find(name, len(content(name))) is not None) == (name in model)


def test_what_somebody_uses_is_found_until_nobody_does() -> None:
    kept = EmbedsCache(0)
    buffer: Buffer | None = Buffer(b"abc")
    assert buffer is not None
    kept.use("frontend.1", buffer, lasting=False, new=True)
    assert kept.find("frontend.1", 3) is buffer
    assert kept.find("frontend.1", 4) is None
    buffer = None
    assert kept.find("frontend.1", 3) is None
    assert kept.stats == EmbedsCacheStats()


def test_what_somebody_uses_is_not_found_and_kept_again_once_all_was_dropped() -> None:
    kept = EmbedsCache(10)
    buffer = Buffer(b"abc")
    kept.use("prompt/a", buffer, lasting=True, new=True)
    kept.clear()
    assert kept.find("prompt/a", len(buffer)) is None
    assert kept.stats == EmbedsCacheStats(kept_misses=1)
