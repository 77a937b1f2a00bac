"""Each policy does what its name says, on any workers."""

from random import Random

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.messages.routing import WorkerLoad
from inlay.router.decide import Ask, Placement, decide
from inlay.router.member import hash_of
from inlay.router.settings import RouterSettings
from inlay.router.snapshot import Pool, Snapshot
from inlay.router.terms import rendezvous_hash
from tests.router.standing import Standing
from tests.router.test_pool import blocks

LENGTH = 16 * 60
loads = st.lists(
    st.tuples(st.integers(0, 10_000), st.integers(0, 10_000), st.integers(0, 60)),
    min_size=1,
    max_size=12,
)
draws = st.floats(0, 1, exclude_max=True)


def pool_of(policy: str, given_loads: list[tuple[int, int, int]], **settings: float) -> Pool:
    """Workers with such loads (positions to compute, to decode) and so many blocks cached."""
    routing = RouterSettings.model_validate(
        {"router_policy": policy, "router_decode_weight": 1, **settings}
    )
    pool = Pool(routing, Random(1))
    workers = [Standing(f"w{number}") for number in range(len(given_loads))]
    pool.take(workers, lambda _: WorkerLoad())
    for member, (prefill, decode, cached) in zip(pool.seated, given_loads, strict=True):
        pool.change(member, prefill=prefill, decode=decode)
        pool.sent(member, blocks(1, cached))
    return pool


def chosen(view: Snapshot) -> int:
    decision = decide(view, Ask(LENGTH, blocks(1, 60)))
    assert isinstance(decision, Placement)
    return decision.part.seat


@given(loads)
def test_in_turn_everybody_is_chosen_once_before_anybody_is_again(
    given_loads: list[tuple[int, int, int]],
) -> None:
    view = pool_of("round-robin", given_loads).view()
    seats = []
    for _ in given_loads:
        seats.append(chosen(view))
        view = view._replace(last=seats[-1])
    assert sorted(seats) == list(range(len(given_loads)))


@given(loads, draws)
def test_the_least_loaded_has_no_more_than_any(
    given_loads: list[tuple[int, int, int]], draw: float
) -> None:
    seat = chosen(pool_of("least-loaded", given_loads).view()._replace(draw=draw))
    load = [prefill + decode for prefill, decode, _ in given_loads]
    assert load[seat] == min(load)


@given(loads, draws)
def test_of_two_the_most_loaded_of_all_is_never_chosen(
    given_loads: list[tuple[int, int, int]], draw: float
) -> None:
    seat = chosen(pool_of("power-of-two", given_loads).view()._replace(draw=draw))
    load = [prefill + decode for prefill, decode, _ in given_loads]
    if len(set(load)) == len(load) > 1:
        assert load[seat] < max(load)


@given(loads, draws)
def test_nobody_would_cost_less_than_who_is_chosen(
    given_loads: list[tuple[int, int, int]], draw: float
) -> None:
    weights = {"router_prefill_weight": 2, "router_decode_weight": 3}
    seat = chosen(pool_of("kv", given_loads, **weights).view()._replace(draw=draw))
    costs = [2 * (prefill - 16 * cached) + 3 * decode for prefill, decode, cached in given_loads]
    assert costs[seat] == min(costs)


def test_a_request_goes_where_its_prefix_is_until_that_worker_has_too_much_to_do() -> None:
    def where(decode: int) -> int:
        return chosen(pool_of("kv", [(0, 0, 0), (0, decode, 32), (0, 0, 0)]).view())

    assert where(0) == where(511) == 1
    assert where(513) != 1


@pytest.mark.parametrize("policy", ["kv", "least-loaded", "power-of-two"])
def test_equals_share_what_comes(policy: str) -> None:
    pool = pool_of(policy, [(0, 0, 0)] * 4)
    counts = np.bincount([chosen(pool.view()) for _ in range(400)], minlength=4)
    assert counts.min() > 60


def test_of_two_every_pair_is_compared_alike() -> None:
    view = pool_of("power-of-two", [(number, 0, 0) for number in range(4)]).view()
    drawn = [chosen(view._replace(draw=at / 1200)) for at in range(1200)]
    # The least of four is in half of the pairs, the next in a third, the third in a sixth.
    assert np.bincount(drawn, minlength=4).tolist() == [600, 400, 200, 0]


@pytest.mark.parametrize("policy", ["least-loaded", "power-of-two"])
def test_imbalance_stays_bounded(policy: str) -> None:
    pool = pool_of(policy, [(0, 0, 0)] * 20)
    for _ in range(2000):
        pool.change(pool.seated[chosen(pool.view())], prefill=1)
    load = pool.view().prefill
    assert load.max() - load.min() <= (1 if policy == "least-loaded" else 10)


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
    found = rendezvous_hash(session, HASHES, np.array(requests, np.int64), slack)
    assert requests[found] < (1 + slack) * (sum(requests) + 1) / 10 + 1
