"""Which weights a name means: one rule over cards, whatever order they are found in."""

from collections.abc import Sequence
from random import Random

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from inlay.base.errors import OverloadedError
from inlay.messages.card import EmbeddingCard, ModelCard, Rollout
from inlay.messages.pooling import OutputCard
from inlay.router import Router
from inlay.router.fleet import Catalog
from inlay.router.shares import Weights, called, drawn, leader, shares_of
from inlay.router.snapshot import PoolKey
from inlay.transport.api import Worker
from tests.router.standing import CARD, Standing


def cards(weights: str, ready: int, since: float, **asked: object) -> list[ModelCard]:
    rollout = Rollout(since=since, **asked)  # type: ignore[arg-type]
    return [replace(CARD, weights_id=weights, rollout=rollout)] * ready


def share(*groups: list[ModelCard]) -> dict[str, float]:
    found = shares_of(card for group in groups for card in group)
    return {weights.weights_id: part for weights, part in found.items()}


ROLLOUTS = st.builds(
    Rollout,
    since=st.floats(0, 5),
    min_workers=st.none() | st.integers(1, 4),
    weight=st.none() | st.floats(0, 10),
)
CARDS = st.lists(
    st.builds(
        lambda weights, dtype, asleep, rollout: replace(
            CARD, weights_id=weights, dtype=dtype, asleep=asleep, rollout=rollout
        ),
        st.sampled_from("abc"),
        st.sampled_from(["float32", "bfloat16"]),
        st.sampled_from([0, 0, 1]),
        ROLLOUTS,
    ),
    min_size=1,
    max_size=12,
)


@given(CARDS, st.randoms())
def test_every_order_of_discovery_gives_the_same_shares(found: list[ModelCard], by: Random) -> None:
    other = list(found)
    by.shuffle(other)
    shares = shares_of(found)
    assert shares == shares_of(other)
    assert list(shares) == list(shares_of(other))
    assert sum(shares.values()) == pytest.approx(1) or not any(shares.values())
    if not any(shares.values()):
        assert all(card.rollout.weight is not None for card in found)


@given(CARDS, st.floats(0, 1, exclude_max=True))
def test_what_is_drawn_has_a_share(found: list[ModelCard], number: float) -> None:
    shares = shares_of(found)
    if any(shares.values()):
        assert shares[drawn(shares, number)] > 0
        assert shares[leader(shares)] == max(shares.values())


def test_a_newcomer_takes_over_once_it_has_more_workers_than_the_old() -> None:
    for old, new, chosen in ((3, 1, "a"), (2, 2, "a"), (1, 2, "b"), (1, 1, "a"), (0, 1, "b")):
        found = share(cards("a", old, 1), cards("b", new, 2))
        assert found[chosen] == 1, (old, new)


def test_a_newcomer_takes_over_once_it_has_as_many_as_it_asks_for() -> None:
    for new, chosen in ((1, "a"), (2, "b"), (3, "b")):
        assert share(cards("a", 3, 1), cards("b", new, 2, min_workers=2))[chosen] == 1
    # What was there first asks for nothing to stay.
    assert share(cards("a", 1, 1, min_workers=4), cards("b", 1, 2))["a"] == 1


def test_a_restarted_worker_of_the_old_weights_does_not_take_them_back() -> None:
    # Nobody of the old ones was left, so that they begin anew.
    assert share(cards("a", 1, 3), cards("b", 1, 2))["b"] == 1
    # Others of the old ones were left: its weights are the older, and have fewer workers.
    assert share(cards("a", 2, 1), cards("b", 3, 2))["b"] == 1
    assert share(cards("a", 3, 1), cards("b", 2, 2, min_workers=2))["b"] == 1


def test_explicit_weights_share_with_the_others_in_place() -> None:
    canary = share(cards("a", 3, 1), cards("b", 1, 2, weight=0.25))
    assert canary == {"a": 0.8, "b": 0.2}
    assert share(cards("a", 1, 1, weight=3), cards("b", 1, 2, weight=1)) == {"a": 0.75, "b": 0.25}
    assert share(cards("a", 1, 1), cards("b", 9, 2, weight=0)) == {"a": 1, "b": 0}
    assert share(cards("b", 9, 2, weight=0)) == {"b": 0}
    assert share(cards("a", 1, 1), cards("b", 1, 2, weight=1, min_workers=2)) == {"a": 1, "b": 0}


def test_sleeping_workers_hold_a_name_only_where_none_is_awake() -> None:
    asleep = [replace(card, asleep=1) for card in cards("a", 3, 1)]
    assert share(asleep, cards("b", 1, 2)) == {"a": 0, "b": 1}
    assert share(asleep) == {"a": 1}


def test_an_alias_is_a_name_too() -> None:
    one = replace(cards("a", 1, 2)[0], name="v1", aliases=("chat",))
    other = replace(cards("b", 1, 1)[0], name="v2", aliases=("chat",))
    assert leader(shares_of(called([one, other], "chat"))) == Weights.of(other)
    assert leader(shares_of(called([other, one], "chat"))) == Weights.of(other)


class Announcing:
    """A plane that has heard of more workers than are connected."""

    def __init__(self, there: Sequence[Worker], announced: Sequence[ModelCard]) -> None:
        self.there, self.told = there, announced

    async def start(self) -> None:
        pass

    async def close(self) -> None:
        pass

    def workers(self) -> Sequence[Worker]:
        return self.there

    def announced(self) -> Sequence[ModelCard]:
        return self.told

    def unavailable(self) -> dict[str, str]:
        return {}

    async def changed(self) -> None:
        raise NotImplementedError

    def room(self, num_bytes: int) -> memoryview | None:
        return None


def standing(*found: ModelCard) -> list[Worker]:
    # A connection's card does not say what NATS does.
    return [Standing(f"w-{n}", replace(card, rollout=Rollout())) for n, card in enumerate(found)]


def test_frontends_that_found_workers_in_another_order_send_to_the_same_weights() -> None:
    told = [*cards("a", 2, 1), *cards("b", 1, 2)]
    orders = (told, told[::-1])
    for number in (0.0, 0.5, 0.99):
        routers = [Router(Announcing(standing(*order), told)) for order in orders]
        assert [r._catalog.draw("m", number).weights_id for r in routers] == ["a", "a"]
        assert [[card.weights_id for card in r.models()] for r in routers] == [["a"], ["a"]]


def test_a_frontend_that_reaches_none_of_the_chosen_serves_what_it_reaches() -> None:
    told = [*cards("a", 2, 1), *cards("b", 1, 2)]
    router = Router(Announcing(standing(told[2]), told))
    assert router.model("m").card.weights_id == "b"
    assert router.shares() == {"m": {Weights("m", "b", "float32"): 1.0}}


def test_a_request_goes_where_its_weights_are_though_others_have_taken_over() -> None:
    told = [*cards("a", 1, 1), *cards("b", 2, 2)]
    router = Router(Announcing(standing(*told), told))
    old = told[0]
    assert router.model("m").card.weights_id == "b"
    assert router._catalog.same_weights(old, old.role).weights_id == "a"


def test_each_change_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    there: list[Worker] = standing(*cards("a", 1, 1))
    told = cards("a", 1, 1)
    catalog = Catalog(lambda: there, dict, announced=lambda: told)
    catalog.models()
    assert not caplog.records
    told = [*cards("a", 1, 1), *cards("b", 2, 2)]
    there = standing(*told)
    catalog.models()
    there = list(there)
    catalog.models()
    (record,) = caplog.records
    assert record.getMessage() == "requests for `m` go to the weights b (float32) 100.0%"


def test_where_no_worker_takes_requests_the_error_says_so() -> None:
    told = cards("a", 1, 1, weight=0)
    router = Router(Announcing(standing(*told), told))
    assert router.model("m").card.weights_id == "a"
    with pytest.raises(OverloadedError, match="take no requests \\(--weight 0\\)"):
        router.choose("m")


def test_the_first_model_is_the_one_that_was_there_first() -> None:
    told = [
        replace(card, name=name)
        for name, card in (("new", cards("b", 1, 2)[0]), ("old", cards("a", 1, 1)[0]))
    ]
    for order in (told, told[::-1]):
        router = Router(Announcing(standing(*order), told))
        assert [card.name for card in router.models()] == ["old", "new"]


def test_workers_that_give_other_outputs_are_of_another_pool() -> None:
    """`--outputs` of a worker is no part of its weights, and changes what it can answer."""

    def giving(names: tuple[str, ...], ready: int, since: float) -> list[ModelCard]:
        outputs = tuple(OutputCard(name=name, size=8) for name in names)
        embedding = EmbeddingCard(size=8, outputs=outputs)
        return [replace(card, embedding=embedding) for card in cards("a", ready, since)]

    told = [*giving(("dense", "sparse"), 2, 1), *giving(("dense",), 1, 2)]
    for order in (told, told[::-1]):
        router = Router(Announcing(standing(*order), told))
        assert router.model("m").card.outputs == ("dense", "sparse")
    assert len({PoolKey.of(card) for card in told}) == 2
    assert sorted(shares_of(told).values()) == [0.0, 1.0]
