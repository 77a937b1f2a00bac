"""The index of cached blocks agrees with a plain set for each holder, whatever is stored, removed, dropped and copied."""

import random

import numpy as np
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, initialize, invariant, rule

from inlay.router.index import Keys, KeyTable, KvIndex, keys_of
from tests.examples import examples

SMALL = 16
"""Slots of the smallest table: copied every few changes."""

chains = st.tuples(st.integers(0, 5), st.integers(1, 12), st.integers(0, 3))


def chain(family: int, length: int, branch: int) -> Keys:
    """Keys of a prompt: prompts of a family share their first four blocks."""
    return keys_of(
        b"".join(
            random.Random(f"{family}-{at}-{branch if at >= 4 else 0}").randbytes(8)
            for at in range(length)
        )
    )


class Index(RuleBasedStateMachine):
    holders = Bundle("holders")

    def __init__(self) -> None:
        super().__init__()
        self.index = KvIndex(SMALL)
        self.held: dict[int, set[int]] = {}
        self.seen: list[Keys] = []

    @initialize(target=holders)
    def first(self) -> int:
        holder = self.index.add_holder()
        self.held[holder] = set()
        return holder

    @rule(target=holders)
    def add(self) -> int:
        holder = self.index.add_holder()
        assert holder not in self.held
        self.held[holder] = set()
        return holder

    @rule(holder=consumes(holders))
    def drop(self, holder: int) -> None:
        self.index.drop(holder)
        del self.held[holder]

    @rule(holder=holders, prompt=chains)
    def store(self, holder: int, prompt: tuple[int, int, int]) -> None:
        keys = chain(*prompt)
        new = set(keys.tolist()) - self.held[holder]
        assert self.index.store(holder, keys) == len(new)
        self.held[holder] |= new
        self.seen.append(keys)

    @rule(holder=holders, prompt=chains, start=st.integers(0, 11))
    def remove(self, holder: int, prompt: tuple[int, int, int], start: int) -> None:
        keys = chain(*prompt)[start:]
        gone = set(keys.tolist()) & self.held[holder]
        assert self.index.remove(holder, keys) == len(gone)
        self.held[holder] -= gone

    @rule(prompt=chains)
    def look(self, prompt: tuple[int, int, int]) -> None:
        self.check(chain(*prompt))

    @invariant()
    def the_last_prompt_is_found(self) -> None:
        if self.seen:
            self.check(self.seen[-1])

    def check(self, keys: Keys) -> None:
        found = self.index.overlap(keys)
        expected = np.zeros(self.index.width, np.int32)
        for holder, held in self.held.items():
            for key in keys.tolist():
                if key not in held:
                    break
                expected[holder] += 1
        assert found.tolist() == expected.tolist()


Index.TestCase.settings = settings(max_examples=examples(40), stateful_step_count=60, deadline=None)
TestIndex = Index.TestCase


def test_memory_follows_what_is_alive() -> None:
    index = KvIndex(1 << 10)
    stay, numbers = index.add_holder(), np.random.default_rng(1)
    kept = keys_of(numbers.bytes(8 * 100))
    index.store(stay, kept)
    for _ in range(30):
        holder = index.add_holder()
        index.store(holder, keys_of(numbers.bytes(8 * 1000)))
        index.drop(holder)
    assert index.nbytes <= 12 * (1 << 14)
    assert index.overlap(kept)[stay] == 100


def test_sets_of_holders_that_no_block_has_are_forgotten() -> None:
    index = KvIndex(1 << 10)
    holders = [index.add_holder() for _ in range(200)]
    shared = keys_of(np.random.default_rng(2).bytes(8 * 50))
    for _ in range(20):
        for holder in holders:
            index.store(holder, shared)
        for holder in holders:
            index.remove(holder, shared[25:])
    assert index.num_sets < 2000
    found = index.overlap(shared)
    assert set(found[holders].tolist()) == {25}


def test_a_holder_may_hold_more_than_the_smallest_table() -> None:
    index = KvIndex(SMALL)
    holder = index.add_holder()
    keys = keys_of(np.random.default_rng(3).bytes(8 * 5000))
    assert index.store(holder, keys) == 5000
    assert index.overlap(keys)[holder] == 5000
    assert index.remove(holder, keys) == 5000
    assert index.overlap(keys)[holder] == 0


def test_keys_that_want_one_slot_all_find_one() -> None:
    table = KeyTable(64)
    keys = np.arange(1, 40, dtype=np.uint64) * np.uint64(64) + np.uint64(3)
    table.put(keys, np.arange(1, 40, dtype=np.int32))
    values, here = table.get(keys)
    assert here.all()
    assert values.tolist() == list(range(1, 40))
    absent, here = table.get(keys + np.uint64(64 * 100))
    assert not here.any()
    assert not absent.any()
    assert table.used == 39
