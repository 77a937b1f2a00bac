"""Shared memory is handed out without overlap and comes back whole."""

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inlay.plane.local import Arena
from inlay.plane.local.arena import ALIGNMENT
from inlay.prompt import Buffer

SIZE = 16 * ALIGNMENT


class ArenaMachine(RuleBasedStateMachine):
    """Buffers are placed, placed again, freed and forgotten in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.arena = Arena(SIZE)
        self.alive: list[Buffer] = []
        self.held: list[tuple[int, bytes]] = []

    @rule(pages=st.integers(1, 6), fill=st.integers(0, 255))
    def place(self, pages: int, fill: int) -> None:
        buffer = Buffer(bytes([fill]) * (pages * ALIGNMENT - fill))
        offset = self.arena.place(buffer)
        if offset is None:
            held = sum(-(-len(content) // ALIGNMENT) * ALIGNMENT for content in dict(self.held).values())
            assert held, "an arena nobody holds has room for anything that fits into it"
            return
        self.alive.append(buffer)
        self.held.append((offset, bytes(buffer.view)))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def place_again(self, data: st.DataObject) -> None:
        buffer = self.alive[data.draw(st.integers(0, len(self.alive) - 1))]
        offset = self.arena.place(buffer)
        if offset is not None:
            self.held.append((offset, bytes(buffer.view)))

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        offset, _ = self.held.pop(data.draw(st.integers(0, len(self.held) - 1)))
        self.arena.free(offset)

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        del self.alive[data.draw(st.integers(0, len(self.alive) - 1))]

    @invariant()
    def what_is_held_is_still_there(self) -> None:
        for offset, content in self.held:
            assert bytes(self.arena.read(offset, len(content)).view) == content

    @invariant()
    def what_is_held_does_not_overlap_and_is_counted(self) -> None:
        spans = {offset: -(-len(content) // ALIGNMENT) * ALIGNMENT for offset, content in self.held}
        assert self.arena.held_bytes == sum(spans.values())
        assert self.arena.held_bytes + self.arena.free_bytes <= SIZE
        ends = sorted((offset, offset + length) for offset, length in spans.items())
        assert all(a[1] <= b[0] for a, b in pairwise(ends))

    def teardown(self) -> None:
        for offset, _ in self.held:
            self.arena.free(offset)
        self.alive.clear()
        assert self.arena.free_bytes == SIZE
        self.arena.close()


TestArena = ArenaMachine.TestCase


def test_reading_beyond_the_arena_is_refused() -> None:
    arena = Arena(ALIGNMENT)
    with pytest.raises(ValueError, match="beyond an arena"):
        arena.read(ALIGNMENT - 1, 2)
    arena.close()


def test_a_buffer_that_lives_is_not_copied_again() -> None:
    arena = Arena(4 * ALIGNMENT)
    buffer = Buffer(bytearray(b"x" * ALIGNMENT))
    first = arena.place(buffer)
    assert first is not None
    arena.free(first)
    assert arena.free_bytes == 3 * ALIGNMENT
    assert arena.place(buffer) == first
    arena.free(first)
    del buffer
    assert arena.free_bytes == 4 * ALIGNMENT
    arena.close()


def test_room_that_is_needed_is_taken_from_what_was_used_longest_ago() -> None:
    arena = Arena(3 * ALIGNMENT)
    kept = [Buffer(bytes([n]) * ALIGNMENT) for n in range(3)]
    offsets = [arena.place(buffer) for buffer in kept]
    for offset in offsets:
        assert offset is not None
        arena.free(offset)
    assert arena.place(kept[0]) == offsets[0]
    new = Buffer(b"n" * ALIGNMENT)
    assert arena.place(new) == offsets[1]
    arena.close()
