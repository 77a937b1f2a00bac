"""Shared memory is handed out without overlap and comes back whole."""

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import Bundle, RuleBasedStateMachine, consumes, invariant, rule

from inlay.plane.local import Arena
from inlay.plane.local.arena import ALIGNMENT
from inlay.prompt import Buffer

SIZE = 16 * ALIGNMENT


class ArenaMachine(RuleBasedStateMachine):
    placed: Bundle[tuple[int, Buffer]] = Bundle("placed")

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(SIZE)
        self.holders: list[tuple[int, Buffer]] = []

    @rule(target=placed, pages=st.integers(1, 6), fill=st.integers(0, 255))
    def place(self, pages: int, fill: int) -> tuple[int, Buffer]:
        buffer = Buffer(bytes([fill]) * (pages * ALIGNMENT - fill))
        offset = self.arena.place(buffer)
        if offset is None:
            assert self.largest_room() < pages * ALIGNMENT
            return (-1, buffer)
        self.holders.append((offset, buffer))
        return (offset, buffer)

    @rule(target=placed, again=placed)
    def place_again(self, again: tuple[int, Buffer]) -> tuple[int, Buffer]:
        if again not in self.holders:
            return (-1, again[1])
        assert self.arena.place(again[1]) == again[0]
        self.holders.append(again)
        return again

    @rule(gone=consumes(placed))
    def free(self, gone: tuple[int, Buffer]) -> None:
        if gone in self.holders:
            self.holders.remove(gone)
            self.arena.free(gone[0])

    def largest_room(self) -> int:
        return max((length for _, length in self.arena._free), default=0)

    @invariant()
    def what_was_placed_is_still_there(self) -> None:
        for offset, buffer in self.holders:
            assert self.arena.read(offset, len(buffer)) == buffer

    @invariant()
    def used_and_free_make_the_whole(self) -> None:
        used = {offset: -(-len(buffer) // ALIGNMENT) * ALIGNMENT for offset, buffer in self.holders}
        assert sum(used.values()) + self.arena.free_bytes == SIZE
        ends = sorted((offset, offset + length) for offset, length in used.items())
        assert all(a[1] <= b[0] for a, b in pairwise(ends))

    def teardown(self) -> None:
        self.arena.close()


TestArena = ArenaMachine.TestCase


def test_reading_beyond_the_arena_is_refused() -> None:
    arena = Arena(ALIGNMENT)
    with pytest.raises(ValueError, match="beyond an arena"):
        arena.read(ALIGNMENT - 1, 2)
    arena.close()
