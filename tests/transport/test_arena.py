"""Shared memory is handed out without overlap and comes back whole."""

from itertools import pairwise

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from inlay.messages.prompt import Buffer
from inlay.transport.local import Arena
from inlay.transport.local.arena import ALIGNMENT

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
        offset = self.arena.put(buffer)
        if offset is None:
            assert self.held or self.arena.reserved_bytes, (
                "an arena nobody holds has room for anything that fits into it"
            )
            return
        self.alive.append(buffer)
        self.held.append((offset, bytes(buffer.view)))

    @rule(pages=st.integers(1, 6), fill=st.integers(0, 255), start=st.integers(0, 300))
    def write_in_place(self, pages: int, fill: int, start: int) -> None:
        room = self.arena.reserve(pages * ALIGNMENT - fill)
        if room is not None:
            room[:] = bytes([fill]) * len(room)
            self.alive.append(Buffer(room[start:]))

    @precondition(lambda self: self.alive)
    @rule(data=st.data())
    def place_again(self, data: st.DataObject) -> None:
        buffer = self.alive[data.draw(st.integers(0, len(self.alive) - 1))]
        offset = self.arena.put(buffer)
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
        # Whole pages: what was written in place may begin behind the beginning of one.
        spans = {
            offset // ALIGNMENT: -(-(offset + len(content)) // ALIGNMENT)
            for offset, content in self.held
        }
        assert self.arena.held_bytes == sum(end - start for start, end in spans.items()) * ALIGNMENT
        assert self.arena.held_bytes + self.arena.free_bytes <= SIZE
        assert all(a[1] <= b[0] for a, b in pairwise(sorted(spans.items())))

    def teardown(self) -> None:
        for offset, _ in self.held:
            self.arena.free(offset)
        self.alive.clear()
        assert self.arena.free_bytes == SIZE
        assert not self.arena.reserved_bytes
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
    first = arena.put(buffer)
    assert first is not None
    arena.free(first)
    assert arena.free_bytes == 3 * ALIGNMENT
    assert arena.put(buffer) == first
    arena.free(first)
    del buffer
    assert arena.free_bytes == 4 * ALIGNMENT
    arena.close()


def test_what_is_written_in_place_is_not_copied() -> None:
    arena = Arena(4 * ALIGNMENT)
    room = arena.reserve(2 * ALIGNMENT)
    assert room is not None
    room[:3] = b"abc"
    buffer = Buffer(room[128:])
    room[128:130] = b"de"
    del room
    offset = arena.put(buffer)
    assert offset == 128
    assert bytes(arena.read(offset, 2).view) == b"de"
    arena.free(offset)
    assert arena.free_bytes == 2 * ALIGNMENT
    del buffer
    assert arena.free_bytes == 4 * ALIGNMENT
    arena.close()


def test_what_is_still_to_be_written_leaves_room_for_what_is_placed() -> None:
    arena = Arena(8 * ALIGNMENT)
    rooms = [arena.reserve(ALIGNMENT) for _ in range(8)]
    assert [room is not None for room in rooms] == [True] * 6 + [False] * 2
    assert arena.put(Buffer(b"x" * 2 * ALIGNMENT)) is not None
    arena.close()


def test_what_would_not_be_aligned_is_copied() -> None:
    arena = Arena(4 * ALIGNMENT)
    room = arena.reserve(ALIGNMENT)
    assert room is not None
    offset = arena.put(Buffer(room[1:]))
    assert offset == ALIGNMENT
    arena.close()


def test_room_that_is_needed_is_taken_from_what_was_used_longest_ago() -> None:
    arena = Arena(3 * ALIGNMENT)
    kept = [Buffer(bytes([n]) * ALIGNMENT) for n in range(3)]
    offsets = [arena.put(buffer) for buffer in kept]
    for offset in offsets:
        assert offset is not None
        arena.free(offset)
    assert arena.put(kept[0]) == offsets[0]
    new = Buffer(b"n" * ALIGNMENT)
    assert arena.put(new) == offsets[1]
    arena.close()
