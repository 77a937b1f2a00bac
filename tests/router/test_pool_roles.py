"""Roles are weights: who computes a prompt for whom, and when each does the other's part."""

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inlay.messages.card import Address, ModelCard, Phase
from inlay.messages.routing import WorkerLoad
from inlay.router.decide import LEAST_HANDOVER
from inlay.router.prices import KNOWN_SECONDS, RouterPrice
from tests.router.test_pool import Made, blocks, card

LONG = 16 * 64
assert LONG >= LEAST_HANDOVER


def member(phase: str, number: int, layout: str = "l", **changes: object) -> ModelCard:
    address = Address("h", 1000 + number, b"f")
    return card(phase=phase, kv_layout=layout, address=address, **changes)


def made(*phases: str, **routing: object) -> Made:
    return Made(*(member(phase, number) for number, phase in enumerate(phases)), **routing)


def places(fleet: Made, length: int = LONG, **how: object) -> tuple[str, str | None]:
    """The worker that makes the tokens, and the one that computes the prompt for it."""
    placed = fleet.placed(length, blocks(1, 64), divisible=True, **how)
    return str(fleet.id_at(placed.part)), fleet.id_at(placed.prompt)


def test_a_busy_decode_worker_has_its_prompts_computed_elsewhere() -> None:
    fleet = made("prefill", "decode", router_interference_weight=0.25)
    # Nobody is delayed: computing here is quicker than fetching.
    assert places(fleet) == ("w1", None)
    fleet.pool.change(fleet.member(1), requests=3, decode=30)
    assert places(fleet) == ("w1", "w0")
    assert places(fleet, LEAST_HANDOVER - 16) == ("w1", None)
    # What is cached need not be computed anywhere.
    fleet.pool.sent(fleet.member(1), blocks(1, 60))
    assert places(fleet) == ("w1", None)


def test_a_prefill_worker_with_a_queue_is_passed_over() -> None:
    fleet = made("prefill", "prefill", "decode", router_interference_weight=0.25)
    fleet.pool.change(fleet.member(2), requests=3, decode=30)
    fleet.pool.change(fleet.member(0), requests=1, prefill=5000)
    assert places(fleet) == ("w2", "w1")
    fleet.pool.change(fleet.member(1), requests=1, prefill=5000)
    assert places(fleet) == ("w2", None)


AT_REST = WorkerLoad()

phases: st.SearchStrategy[Phase] = st.sampled_from(["prefill", "decode", "both"])
loads = st.builds(
    WorkerLoad,
    st.integers(0, 3),
    st.sampled_from([0, 16, 4 * LONG]),
    st.sampled_from([0, 256]),
)


@settings(deadline=None)
@given(
    st.lists(st.tuples(phases, loads, st.sampled_from([0, 60])), min_size=2, max_size=6),
    st.sampled_from([0.05, 0.2, 0.5, 2.0]),
    st.sampled_from([0.0, 0.005, 0.25]),
    st.integers(1, 64),
)
# Two that are alike: any of them.
@example([("prefill", AT_REST, 0), ("decode", AT_REST, 0)], 0.2, 0.005, 10)
def test_where_no_split_pays_roles_are_no_constraint(
    workers: list[tuple[Phase, WorkerLoad, int]], price: float, weight: float, num_blocks: int
) -> None:
    keys, found = blocks(1, num_blocks), []
    for apart in (True, False):
        fleet = made(
            *(phase if apart else "both" for phase, _, _ in workers),
            router_interference_weight=weight,
            router_fetch_weight=price,
        )
        for number, (_, load, cached) in enumerate(workers):
            fleet.pool.change(fleet.member(number), load.requests, load.prefill, load.decode)
            fleet.pool.sent(fleet.member(number), blocks(1, cached))
        found.append(fleet.placed(16 * num_blocks, keys, divisible=True))
    chosen, whole = found
    assert whole.prompt is None
    if 4 * weight <= price:
        assert chosen.part == whole.part
    if chosen.prompt is not None:
        # One does, by the formula.
        here, there = (workers[one.seat][1] for one in (chosen.part, chosen.prompt))
        assert there.requests < here.requests
        decoded = 0.05 * max(there.decode - here.decode, 0)
        work = chosen.part.work
        delayed = weight * here.requests * work
        queued = there.prefill - here.prefill
        assert queued + decoded + price * work < work + delayed


def test_a_prompt_is_handed_over_only_to_where_it_delays_fewer() -> None:
    fleet = made("prefill", "decode", router_interference_weight=0.25)
    fleet.pool.change(fleet.member(0), requests=3)
    fleet.pool.change(fleet.member(1), requests=3, decode=30)
    assert places(fleet) == ("w1", None)
    fleet.pool.change(fleet.member(1), requests=1)
    assert places(fleet) == ("w1", "w0")


def test_each_takes_whole_requests_where_there_are_no_others() -> None:
    assert places(made("prefill", "prefill"))[1] is None
    fleet = made("prefill", "decode", router_worker_backlog=0)
    fleet.pool.change(fleet.member(1), requests=4)
    assert places(fleet) == ("w0", None)
    # Or where all others have far more to do.
    fleet = made("prefill", "decode")
    fleet.pool.change(fleet.member(1), prefill=LONG // 2)
    assert places(fleet) == ("w0", None)


def test_a_worker_of_both_roles_gives_a_prompt_away_only_where_that_is_quicker() -> None:
    fleet = made("prefill", "both", router_interference_weight=0.25)
    fleet.pool.change(fleet.member(1), requests=3, decode=30)
    assert places(fleet) == ("w1", None)
    # Its prompts before this one take longer than a fetch.
    fleet.pool.change(fleet.member(1), prefill=LONG // 2)
    assert places(fleet) == ("w1", "w0")


@pytest.mark.parametrize("layouts", [("a", "b"), ("", "")])
def test_pages_of_another_layout_are_not_handed_over(layouts: tuple[str, str]) -> None:
    cards = [member(phase, n, layouts[n]) for n, phase in enumerate(("prefill", "decode"))]
    fleet = Made(*cards, router_interference_weight=0.25)
    fleet.pool.change(fleet.member(1), requests=3, decode=30)
    assert places(fleet) == ("w1", None)


def test_what_can_be_fetched_is_cheaper_than_what_must_be_computed() -> None:
    fleet = made("both", "both", "both")
    keys = blocks(1, 64)
    fleet.pool.sent(fleet.member(0), keys)
    # The holder is busy: another fetches, at a fifth of the price of computing.
    fleet.pool.change(fleet.member(0), requests=1, prefill=LONG // 2)
    part = fleet.placed(LONG, keys).part
    assert fleet.id_at(part) != "w0"
    assert part.holders == (member("both", 0).address,)
    assert (part.cached, part.work) == (0, LONG - int(0.8 * LONG))
    for _ in range(9):
        fleet.pool.price.computed(LONG, 1.0)
        fleet.pool.price.fetched(LONG, 2.0)
    assert fleet.chosen(LONG, keys) == "w0"


def test_what_goes_by_ticket_is_handed_over_and_never_fetched() -> None:
    cards = [member(phase, n, kv_tickets=True) for n, phase in enumerate(("prefill", "decode"))]
    fleet = Made(*cards, router_interference_weight=0.25)
    fleet.pool.sent(fleet.member(0), blocks(1, 40))
    fleet.pool.change(fleet.member(1), requests=3, decode=30)
    part, prompt, _ = fleet.placed(LONG, blocks(1, 64), divisible=True)
    assert prompt is not None
    assert (fleet.id_at(part), fleet.id_at(prompt)) == ("w1", "w0")
    assert (part.holders, part.work, prompt.work) == ((), LONG, LONG - 16 * 40)


def test_a_price_is_measured_and_forgotten() -> None:
    now = 0.0
    price = RouterPrice(0.2, lambda: now)
    price.fetched(1000, 1.0)
    assert price.value == 0.2
    price.computed(1000, 2.0)
    # A few positions say nothing of the rate.
    price.computed(3, 9.0)
    assert price.value == 0.5
    price.fetched(1000, 1e9)
    assert price.value == 10.0
    now = KNOWN_SECONDS + 1
    assert price.value == 0.2
    price.fetched(1000, 1.0)
    assert price.value == 0.5
    # Others were computed meanwhile, at 2 ms each.
    price.fetched(1000, 3.0, 500)
    assert price.value == pytest.approx(0.7 * 0.5 + 0.3 * 1.0)
    price.fetched(900, 9.0, 500)
    assert price.value == pytest.approx(0.65)
