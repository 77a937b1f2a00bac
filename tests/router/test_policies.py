"""Each policy does what its name says, on any view."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.router.policies import (
    Kv,
    LeastLoaded,
    Policy,
    PowerOfTwo,
    RoundRobin,
    View,
    Weights,
    hash_of,
    policy_of,
    rendezvous_hash,
)
from inlay.router.settings import RouterSettings

WEIGHTS = Weights(1, 1)


@st.composite
def views(draw: st.DrawFn) -> View:
    seats = sorted(draw(st.sets(st.integers(0, 50), min_size=1, max_size=12)))
    numbers = st.lists(st.integers(0, 10_000), min_size=len(seats), max_size=len(seats))
    length = draw(st.integers(1, 5000))
    cached = [min(length, blocks * 16) for blocks in draw(numbers)]
    return View(
        np.array(seats, np.int64),
        np.array(draw(numbers), np.int64),
        np.array(draw(numbers), np.int64),
        np.array(cached, np.int64),
        length,
    )


@pytest.mark.parametrize("name", ["kv", "least-loaded", "power-of-two", "round-robin"])
@given(view=views())
def test_every_policy_chooses_one_of_those_it_may(name: str, view: View) -> None:
    policy = policy_of(RouterSettings.model_validate({"router_policy": name}), Random(1))()
    for _ in range(3):
        assert 0 <= policy.choose(view) < len(view.seats)


@given(views())
def test_in_turn_everybody_is_chosen_once_before_anybody_is_again(view: View) -> None:
    policy = RoundRobin()
    chosen = [policy.choose(view) for _ in view.seats]
    assert sorted(chosen) == list(range(len(view.seats)))


@given(views())
def test_the_least_loaded_has_no_more_than_any(view: View) -> None:
    chosen = LeastLoaded(Random(1), WEIGHTS).choose(view)
    load = view.load(WEIGHTS)
    assert load[chosen] == load.min()


@given(views())
def test_of_two_the_most_loaded_of_all_is_never_chosen(view: View) -> None:
    chosen = PowerOfTwo(Random(1), WEIGHTS).choose(view)
    load = view.load(WEIGHTS)
    if len(set(load.tolist())) == len(view.seats) > 1:
        assert load[chosen] < load.max()


@given(views())
def test_nobody_would_cost_less_than_who_is_chosen(view: View) -> None:
    assert view.cached is not None
    chosen = Kv(Random(1), Weights(2, 3)).choose(view)
    costs = [
        2 * (prefill + view.length - cached) + 3 * decode
        for prefill, decode, cached in zip(
            view.prefill.tolist(), view.decode.tolist(), view.cached.tolist(), strict=True
        )
    ]
    assert costs[chosen] == min(costs)


def idle(cached: list[int], length: int) -> View:
    none = np.zeros(len(cached), np.int64)
    return View(np.arange(len(cached)), none, none, np.array(cached, np.int64), length)


def test_a_request_goes_where_its_prefix_is_until_that_worker_has_too_much_to_do() -> None:
    policy: Policy = Kv(Random(1), WEIGHTS)
    view = idle([0, 512, 0], 600)
    assert policy.choose(view) == 1
    assert policy.choose(view._replace(decode=np.array([0, 511, 0]))) == 1
    assert policy.choose(view._replace(decode=np.array([0, 513, 0]))) != 1


def test_equals_share_what_comes() -> None:
    policy = Kv(Random(1), WEIGHTS)
    counts = np.bincount([policy.choose(idle([0] * 4, 100)) for _ in range(400)], minlength=4)
    assert counts.min() > 60


@pytest.mark.parametrize(
    "policy", [LeastLoaded(Random(2), WEIGHTS), PowerOfTwo(Random(2), WEIGHTS)]
)
def test_imbalance_stays_bounded(policy: Policy) -> None:
    loads = np.zeros(20, np.int64)
    for _ in range(2000):
        view = View(np.arange(20), loads, np.zeros(20, np.int64), None, 1)
        loads[policy.choose(view)] += 1
    assert loads.max() - loads.min() <= (1 if isinstance(policy, LeastLoaded) else 10)


HASHES = np.array([hash_of(f"worker-{n}") for n in range(10)], np.uint64)


def test_a_session_stays_when_other_workers_come_and_go() -> None:
    requests = np.zeros(10, np.int64)
    homes = {str(n): rendezvous_hash(str(n), HASHES, requests, 0.25) for n in range(200)}
    assert set(homes.values()) == set(range(10))
    fewer = np.delete(HASHES, 3)
    for session, before in homes.items():
        after = rendezvous_hash(session, fewer, requests[:9], 0.25)
        if before != 3:
            assert after == (before if before < 3 else before - 1)


@given(st.lists(st.integers(0, 50), min_size=10, max_size=10), st.text(min_size=1), st.floats(0, 2))
def test_no_session_stays_with_a_worker_that_has_more_than_its_share(
    requests: list[int], session: str, slack: float
) -> None:
    chosen = rendezvous_hash(session, HASHES, np.array(requests, np.int64), slack)
    assert requests[chosen] < (1 + slack) * (sum(requests) + 1) / 10 + 1
