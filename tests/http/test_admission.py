"""Rates, shares and the byte budget, by a clock of their own."""

import math
import threading
from concurrent import futures
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.errors import BodyTooLargeError, OverloadedError, RateLimitedError
from inlay.base.pace import Unwanted, while_wanted
from inlay.http import FrontendSettings
from inlay.http.bodies.accounting import ByteBudget, Reservation, bytes_alive
from inlay.http.callers.auth import ANYONE, Caller, Tenant
from inlay.http.callers.clients import Client, Clients, TokenBucket, default_share, network
from inlay.http.callers.keys import ClientLimits
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens

MIB = 1024 * 1024


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


@given(
    rate=st.floats(0.5, 5000),
    waits=st.lists(st.floats(0, 120), min_size=1, max_size=60),
)
@settings(max_examples=60, derandomize=True, deadline=None)
def test_no_more_is_let_in_than_the_rate_allows_and_a_wait_is_exactly_enough(
    rate: float, waits: list[float]
) -> None:
    clock = Clock()
    bucket = TokenBucket(rate, clock)
    began = clock.now
    for taken, wait in enumerate(waits, 1):
        clock.now += wait
        needed = bucket.take()
        if needed:
            assert bucket.take() == pytest.approx(needed)
            clock.now += needed
            assert bucket.take() == 0
        assert taken <= max(1, rate) + (clock.now - began) * rate / 60 + 1e-6


def test_a_bucket_gives_a_minutes_worth_at_once_and_then_evenly() -> None:
    clock = Clock()
    bucket = TokenBucket(30, clock)
    assert [bucket.take() for _ in range(30)] == [0.0] * 30
    assert bucket.take() == pytest.approx(2.0)
    clock.now += 1.5
    assert bucket.take() == pytest.approx(0.5)
    clock.now += 0.5
    assert bucket.take() == 0
    bucket.set_rate(60)
    assert bucket.take() == pytest.approx(1.0)
    clock.now += 1e6
    assert bucket.full
    bucket.set_rate(2)
    assert [bucket.take() for _ in range(3)] == [0, 0, 30]


def clients(clock: Clock | None = None, **fields: Any) -> Clients:
    return Clients(FrontendSettings(**fields), clock=clock or Clock())


def anyone(known: Clients, address: str = "10.0.0.1") -> Client:
    return known.of(ANYONE, address)


def test_one_over_its_rate_is_told_when_to_come_back_and_another_is_not_held_up() -> None:
    clock = Clock()
    known = clients(clock, max_client_rate=2)
    for _ in range(2):
        with anyone(known):
            pass
    with pytest.raises(RateLimitedError, match="2 requests a minute") as raised:
        anyone(known).__enter__()
    assert raised.value.retry_after == pytest.approx(30)
    with anyone(known, "10.0.0.2"):
        pass
    clock.now += 30
    with anyone(known):
        pass


def test_a_keys_own_share_goes_before_the_settings_and_a_new_one_counts_at_once() -> None:
    known = clients(max_client_rate=1, max_client_requests=10)
    key = Tenant("alice", "alice")
    with known.of(Caller(key, share=ClientLimits(rate=600, max_requests=1)), "10.0.0.1") as first:
        assert first.share == ClientLimits(600, 1, default_share(FrontendSettings()).max_bytes)
        # From wherever it asks, a key is one client.
        with pytest.raises(RateLimitedError, match="1 requests under way"):
            known.of(
                Caller(key, share=ClientLimits(rate=600, max_requests=1)), "10.0.0.9"
            ).__enter__()
        with known.of(Caller(key, share=ClientLimits(max_requests=2)), "10.0.0.9") as second:
            assert second is first


def test_a_client_may_have_half_of_the_requests_under_way() -> None:
    known = clients(max_inflight_requests=4)
    with anyone(known), anyone(known):
        with pytest.raises(RateLimitedError) as raised:
            anyone(known).__enter__()
        assert raised.value.retry_after == 1
        with anyone(known, "10.0.0.2"):
            pass
    with anyone(known):
        pass


def test_clients_are_forgotten_when_there_is_nothing_to_remember() -> None:
    clock = Clock()
    known = clients(clock)
    for number in range(10):
        with anyone(known, f"10.0.0.{number}"):
            assert len(known) == 1
    assert len(known) == 0
    rated = clients(clock, max_client_rate=60)
    for number in range(10_000):
        clock.now += 0.01
        with anyone(rated, f"10.1.{number // 256}.{number % 256}"):
            pass
    assert len(rated) <= 4097


@pytest.mark.parametrize(
    ("one", "other", "same"),
    [
        ("10.0.0.1", "10.0.0.2", False), ("2001:db8::1", "2001:db8::ffff:1", True),
        ("2001:db8::1", "2001:db8:0:1::1", False), ("::ffff:10.0.0.1", "10.0.0.1", True),
        ("fe80::1%eth0", "fe80::2%eth1", True), ("", "", True),
    ],
)  # fmt: skip
def test_addresses_of_one_subscriber_are_one_client(one: str, other: str, same: bool) -> None:
    assert (network(one) == network(other)) is same


def test_the_share_of_bytes_is_half_but_one_largest_request_at_least() -> None:
    def share(**fields: int) -> int | None:
        return default_share(FrontendSettings(**fields)).max_bytes  # type: ignore[arg-type]

    assert share() == 128 * MIB
    assert share(max_body_bytes=100 * MIB) == 175 * MIB
    assert share(max_body_bytes=200 * MIB) is None
    assert share(max_client_bytes=5) == 5


def reservation(budget: ByteBudget, client: Client | None = None) -> Reservation:
    made = Reservation(budget)
    made.client = client
    return made


def test_a_reservation_gives_back_what_it_took_whatever_happens() -> None:
    budget, known = ByteBudget(100), clients(max_client_bytes=60)
    client = anyone(known)
    with client, reservation(budget, client) as held:
        held.grow_to(10)
        held.grow_to(50)
        held.grow_to(20)
        assert (budget.used, client.bytes, held.size) == (50, 50, 50)
        held.shrink_to(30)
        held.shrink_to(40)
        assert (budget.used, client.bytes) == (30, 30)
        with pytest.raises(BodyTooLargeError, match="one client may hold 60"):
            held.grow_to(61)
        assert (budget.used, client.bytes) == (30, 30)
    assert (budget.used, client.bytes, len(known)) == (0, 0, 0)


def test_what_is_over_is_the_callers_first_and_the_servers_then() -> None:
    budget, known = ByteBudget(100), clients(max_client_bytes=60)
    one, other = anyone(known), anyone(known, "10.0.0.2")
    with reservation(budget, one) as first, reservation(budget, other) as second:
        first.grow_to(40)
        with pytest.raises(RateLimitedError, match="pass your share of 60") as limited:
            reservation(budget, one).grow_to(30)
        second.grow_to(50)
        with pytest.raises(OverloadedError, match="limit of 100") as full:
            reservation(budget, one).grow_to(15)
        assert (limited.value.retry_after, full.value.retry_after) == (1, 1)
        reservation(budget, one).grow_to(10)


def test_memory_for_a_block_is_waited_for_and_given_back() -> None:
    budget, known = ByteBudget(100), clients(max_client_bytes=60)
    one, other = reservation(budget, anyone(known)), reservation(budget, anyone(known, "10.0.0.2"))
    other.grow_to(20)

    def used_meanwhile() -> int:
        with other.lend(11):
            return budget.lent

    with futures.ThreadPoolExecutor(1) as threads:
        with one.lend(40):
            assert (budget.used, budget.lent) == (60, 40)
            # Beside the first it would pass half of the budget.
            waiting = threads.submit(used_meanwhile)
            assert not futures.wait([waiting], timeout=0.3).done
        assert waiting.result(60) == 11
    assert (budget.used, budget.lent) == (20, 0)


def test_one_block_alone_gets_its_memory_whatever_others_hold() -> None:
    budget, known = ByteBudget(100), clients(max_client_bytes=60)
    one, other = reservation(budget, anyone(known)), reservation(budget, anyone(known, "10.0.0.2"))
    one.grow_to(50)
    other.grow_to(50)
    with one.lend(80):
        assert budget.used == 180
    assert (budget.used, budget.lent) == (100, 0)


def test_who_is_not_wanted_any_more_does_not_wait_for_memory() -> None:
    budget, left = ByteBudget(100), threading.Event()
    held = reservation(budget)

    def taken() -> None:
        with held.lend(40):
            raise AssertionError("it has no memory")

    with futures.ThreadPoolExecutor(1) as threads, held.lend(40):
        waiting = threads.submit(while_wanted, left, taken)
        left.set()
        with pytest.raises(Unwanted):
            waiting.result(60)
    assert (budget.used, budget.lent) == (0, 0)


def rows(buffer: Buffer, count: int) -> Rows:
    return Rows(buffer, "float32", (count, 2))


def test_a_row_counts_with_the_file_it_is_a_view_of_and_shared_memory_once() -> None:
    file = bytes(1000)
    view = rows(Buffer(memoryview(file)[100:124]), 3)
    other = rows(Buffer(np.zeros(16, np.uint8).data), 2)
    prompt = Prompt.of(Tokens([1]), view, Tokens([2]), view.slice(0, 1))
    assert bytes_alive([prompt, prompt]) == 1000
    assert bytes_alive([prompt, Prompt.of(other)]) == 1016
    assert bytes_alive([Prompt.of(Tokens([1]))]) == 0


def test_the_default_share_of_requests_is_at_least_one() -> None:
    assert default_share(FrontendSettings(max_inflight_requests=1)).max_requests is None
    assert default_share(FrontendSettings(max_inflight_requests=3)).max_requests == 1
    assert math.isinf(default_share(FrontendSettings()).rate or math.inf)
