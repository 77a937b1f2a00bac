"""Processes of one user and machine write messages into each other's memory; all others use TCP."""

import asyncio
import errno
import gc
import os
import resource
import socket
import stat
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import closing, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.address import Address
from inlay.base.errors import OverloadedError
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.transport import TcpPeer
from inlay.transport.buffer_offers import BufferPlace
from inlay.transport.events import Offered, WireMessage
from inlay.transport.listener import MAX_UNPROVEN
from inlay.transport.local import same_host
from inlay.transport.local.same_host import NOTHING_SHARED
from inlay.transport.memory import ReceiveMemory
from inlay.transport.wire import CHUNK_BYTES, FrameReader, FrameWriter
from tests.transport.test_transport import Ends, Note, counted

pytestmark = pytest.mark.skipif(
    sys.platform != "linux", reason="sockets without a file are Linux's"
)

SMALL_ARENA = 1 << 20


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with Ends.open(neighbours=True) as ends:
        yield ends


def shares(connection: TcpPeer[Any]) -> bool:
    return connection._shared.ours is not None and bool(connection._shared.theirs)


def all_gone(memories: Sequence[weakref.ref[Any]]) -> bool:
    return not any(memory() for memory in memories)


async def until(done: Callable[[], object]) -> None:
    while not done():  # nobody tells
        gc.collect()
        await asyncio.sleep(0.01)


@pytest.mark.thorough
async def test_large_messages_pass_no_socket_and_their_memory_is_given_back(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    assert shares(ours)
    assert shares(theirs)
    data = os.urandom(5_000_000)
    moved = counted(ours)
    for number in range(40):
        ours.send(Note(str(number), (Buffer(data), Buffer(b"tail"))))
        note = await theirs.receive()
        assert isinstance(note, Note)
        assert (note.text, bytes(note.data[0].view), bytes(note.data[1].view)) == (
            str(number),
            data,
            b"tail",
        )
    assert moved() < 40_000
    theirs.send(note)
    assert bytes((await ours.receive()).data[0].view) == data
    del note
    arena = theirs._shared.ours
    assert arena is not None
    await until(lambda: ends.memory.used == 0)
    assert arena.free_bytes == arena.size


async def test_what_has_no_room_in_shared_memory_is_sent(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(same_host, "ARENA_BYTES", SMALL_ARENA)
    ours, theirs = await ends.pair()
    moved = counted(ours)
    small, large = os.urandom(300_000), os.urandom(2 * SMALL_ARENA)
    ours.send(Note("both", (Buffer(small), Buffer(large), Buffer(small[1:]))))
    first = await theirs.receive()
    assert isinstance(first, Note)
    assert [bytes(each.view) for each in first.data] == [small, large, small[1:]]
    assert len(large) <= moved() < len(large) + 100_000
    # While its reader keeps one, others have no room and come all the same.
    kept = []
    for number in range(6):
        ours.send(Note(str(number), (Buffer(small),)))
        kept.append(await theirs.receive())
    assert all(isinstance(note, Note) and bytes(note.data[0].view) == small for note in kept)


@pytest.mark.thorough
async def test_what_is_made_in_lent_memory_is_not_copied_and_the_memory_is_given_back(
    ends: Ends,
) -> None:
    ours, theirs = await ends.pair()
    data, moved = os.urandom(5_000_000), counted(ours)
    for number in range(20):
        lent = theirs.reserve_reply(6_000_000)
        assert lent is not None
        made = ours.reply_memory(lent.place)
        made[: len(data)] = data
        ours.send(Note(str(number), (Buffer(made[: len(data)]), Buffer(b"tail"), Buffer(made[:0]))))
        note = await theirs.receive()
        assert isinstance(note, Note)
        assert [bytes(each.view) for each in note.data] == [data, b"tail", b""]
        # It is the same memory.
        made[0] ^= 255
        assert note.data[0].view[0] == data[0] ^ 255
    assert moved() < 20_000
    arena = theirs._shared.ours
    assert arena is not None
    # What is held is lent to nobody else, and no more than there is.
    held = [theirs.reserve_reply(6_000_000) for _ in range(20)]
    found = [one.place.offset for one in held if one is not None]
    assert 0 < len(found) < 20
    assert len(set(found)) == len(found)
    del held, lent, note, made
    await until(lambda: ends.memory.used == 0)
    assert arena.free_bytes == arena.size


@pytest.mark.thorough
async def test_where_nothing_is_lent_nothing_can_be(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    for place in (
        BufferPlace(-1, 5),
        BufferPlace(0, -1),
        BufferPlace(0, same_host.ARENA_BYTES + 1),
        BufferPlace(1 << 62, 1),
    ):
        with pytest.raises(ValueError, match="are lent of a memory"):
            ours.reply_memory(place)
    # That the memory was given back does not show to who writes there late.
    lent = theirs.reserve_reply(500_000)
    assert lent is not None
    made = ours.reply_memory(lent.place)
    del lent
    gc.collect()
    ours.send(Note("late", (Buffer(made),)))
    with pytest.raises(EOFError):
        await theirs.receive()
    assert theirs.reserve_reply(1) is None


async def test_small_messages_pass_a_large_one(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    ours.send(Note("large", (Buffer(bytes(40_000_000)),)))
    for number in range(5):
        ours.send(Note(str(number)))
    texts = [note.text for note in [await theirs.receive() for _ in range(6)]]  # type: ignore[union-attr]
    assert texts == ["0", "1", "2", "3", "4", "large"]


async def test_only_so_much_memory_is_shared_and_further_neighbours_share_none() -> None:
    limit = 2 * same_host.ARENA_BYTES
    async with Ends.open(limit, neighbours=True) as ends:
        pairs = [await ends.pair() for _ in range(3)]
        assert [theirs._shared.ours is not None for _, theirs in pairs] == [True, True, False]
        data = os.urandom(1_000_000)
        for ours, theirs in pairs:
            ours.send(Note("large", (Buffer(data),)))
            note = await theirs.receive()
            assert isinstance(note, Note)
            assert bytes(note.data[0].view) == data
        # What one gives up another may have.
        one, other = pairs[0]
        one.abort()
        with pytest.raises(EOFError):
            await other.receive()
        await until(lambda: ends.memory.may_share(same_host.ARENA_BYTES))
        assert shares((await ends.pair())[1])


async def test_the_end_of_either_frees_the_memory_of_both(ends: Ends) -> None:
    for cuts in range(2):
        pair = await ends.pair()
        memories = [weakref.ref(end._shared.ours) for end in pair]
        # In the middle of a message that was granted and that is not written yet.
        pair[0].send(Note("large", (Buffer(bytes(40_000_000)),)))
        while not pair[0]._writer._large[1].granted:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0)
        thawed = pair[0]._shared.theirs
        pair[cuts].abort()
        with pytest.raises(EOFError):
            await pair[1 - cuts].receive()
        assert all(end._shared == NOTHING_SHARED for end in pair)
        await until(partial(all_gone, memories))
        await until(lambda: ends.memory.used == 0)
        # One that stood still meanwhile writes to what nobody reads.
        thawed[:] = b"x" * len(thawed)
        ours, theirs = await ends.pair()
        ours.send(Note("next", (Buffer(bytes(1_000_000)),)))
        note = await theirs.receive()
        assert isinstance(note, Note)
        assert note.data[0] == Buffer(bytes(1_000_000))
        del note


def no_memory(name: str, flags: int) -> int:
    raise OSError(errno.ENOMEM, "no memory")


@pytest.mark.thorough
async def test_where_no_neighbour_is_found_or_it_refuses_the_connection_is_over_tcp(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def dialled() -> bool:
        ours, _ = await ends.pair()
        near: bool = ours._transport.get_extra_info("socket").family == socket.AF_UNIX  # type: ignore[union-attr]
        assert near == shares(ours)
        ours.send(Note("hello"))
        return near

    assert await dialled()
    # The kernel says that the socket is of another user than this one.
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        assert not await dialled()
    # This Python knows no such memory.
    with monkeypatch.context() as other:
        other.setattr(same_host, "_AVAILABLE", False)
        assert not await dialled()
    # The system gives none.
    with monkeypatch.context() as other:
        other.setattr(os, "memfd_create", no_memory)
        assert not await dialled()
    # It is found, and does not want to know the dialler.
    with monkeypatch.context() as other:
        other.setattr("inlay.transport.listener.MAX_UNPROVEN", -1)
        found = asyncio.create_task(ends.dial())
        await until(found.done)
        with pytest.raises(OverloadedError, match="no connection"):
            found.result()
    async with Ends.open() as apart:
        assert not shares((await apart.pair())[0])


async def test_another_secret_is_no_neighbour(ends: Ends) -> None:
    with pytest.raises(OverloadedError, match="no connection"):
        await ends.dial(Secret(bytes(32)))
    assert ends.accepted.empty()
    assert shares((await ends.pair())[0])


@pytest.mark.thorough
@pytest.mark.parametrize("turns", range(6))
async def test_a_listener_that_closes_while_neighbours_come_leaves_no_socket(turns: int) -> None:
    before = _sockets()
    async with Ends.open(neighbours=True) as ends:
        name = same_host._name(ends.port, ends.identity.fingerprint)
        # As it begins to listen, and as the first has been accepted.
        for _ in range(turns):
            await asyncio.sleep(0)
        coming = [socket.socket(socket.AF_UNIX) for _ in range(3)]
        for one in coming:
            one.connect(name)
        for _ in range(turns):
            await asyncio.sleep(0)
        ends.listener.close()
        for one in coming:
            one.close()
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    assert _sockets() - before == set()


def _sockets() -> set[int]:
    """Inodes of the sockets of this process."""
    gc.collect()
    # The last is that of the listing itself.
    links = [str(fd.readlink()) for fd in list(Path("/proc/self/fd").iterdir()) if fd.is_symlink()]
    return {int(link[8:-1]) for link in links if link.startswith("socket:[")}


def _unsealed() -> list[int]:
    found = [os.memfd_create("test") for _ in range(2)]
    for fd in found:
        os.ftruncate(fd, same_host.ARENA_BYTES)
    return found


@pytest.mark.thorough
async def test_strangers_get_nothing_and_members_are_served_afterwards(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = same_host.ARENA_BYTES
    whole = same_host._greeting.pack(size, size)
    name = same_host._name(ends.port, ends.identity.fingerprint)
    cases: list[tuple[bytes, list[int]]] = [
        (b"", []),
        (b"GET / HTTP/1.1\r\n\r\n", []),
        (whole, []),
        (whole, _unsealed()),
        (whole, _unsealed()[:1]),
        (same_host._greeting.pack(2 * size, size), [same_host._sealed_file(size)] * 2),
        (whole, [same_host._sealed_file(size // 2)] * 2),
        (same_host._greeting.pack(0, 0) + b"no proof at all" * 8, []),
    ]
    for data, fds in cases:
        with closing(socket.socket(socket.AF_UNIX)) as stranger:
            stranger.setblocking(False)
            stranger.connect(name)
            if data:
                socket.send_fds(stranger, [data], fds)
            else:
                stranger.shutdown(socket.SHUT_WR)
            # At most its own half of the proof's nonces, and then the end.
            loop, came = asyncio.get_running_loop(), b""
            try:
                while part := await loop.sock_recv(stranger, 4096):
                    came += part
            except ConnectionResetError:
                pass
            assert len(came) < 64
        for fd in set(fds):
            os.close(fd)
    with monkeypatch.context() as other:
        other.setattr(os, "geteuid", lambda: os.getuid() + 1)
        with closing(socket.socket(socket.AF_UNIX)) as stranger:
            stranger.setblocking(False)
            stranger.connect(name)
            assert not await asyncio.get_running_loop().sock_recv(stranger, 1)
    many = [socket.socket(socket.AF_UNIX) for _ in range(MAX_UNPROVEN + 20)]
    for stranger in many:
        stranger.setblocking(False)
        stranger.connect(name)
    # The last ones are turned away; with the others gone, members come in.
    assert not await asyncio.get_running_loop().sock_recv(many[-1], 1)
    for stranger in many:
        stranger.close()
    await until(lambda: len(ends.listener._greeting) == 1)
    assert shares((await ends.pair())[0])


class Memory:
    """A writer, a reader, and the memory that one writes to and the other reads."""

    def __init__(self, size: int) -> None:
        self.bytes = bytearray(size)
        self.writer = FrameWriter(shared=memoryview(self.bytes))
        self.reader = FrameReader(self.writer.on_grant, 1 << 30)

    def feed(self, data: bytes) -> list[object]:
        found: list[object] = []
        while data:
            place = self.reader.buffer()[: len(data)]
            place[:] = data[: len(place)]
            data = data[len(place) :]
            found += self.reader.advance(len(place))
        return found

    def offered(self, offsets: dict[int, int]) -> int:
        """Offer a message of two buffers; return its number, granted at these offsets."""
        self.writer.put(Note("large", (Buffer(bytes(CHUNK_BYTES)), Buffer(b"12345"))))
        events = self.feed(b"".join(self.writer.take(1 << 20)))
        (offered,) = [event for event in events if isinstance(event, Offered)]
        parts: list[Buffer | memoryview] = []
        for part, size in enumerate(offered.offer.sizes):
            start = offsets.get(part)
            whole = memoryview(self.bytes)
            parts.append(
                memoryview(bytearray(size)) if start is None else whole[start : start + size]
            )
        self.reader.accept(offered.number, parts, offered.offer.names, offsets)
        return offered.number


@given(
    first=st.one_of(st.none(), st.integers(0, 100)),
    second=st.one_of(st.none(), st.integers(CHUNK_BYTES + 100, CHUNK_BYTES + 200)),
    limit=st.integers(1, 1 << 21),
)
def test_parts_are_whole_wherever_they_go(
    first: int | None, second: int | None, limit: int
) -> None:
    memory = Memory(CHUNK_BYTES + 300)
    given_ = {1: first, 2: second}
    offsets = {part: offset for part, offset in given_.items() if offset is not None}
    number = memory.offered(offsets)
    memory.writer.on_grant(number, (), offsets)
    events: list[object] = []
    while pieces := memory.writer.take(limit):
        events += memory.feed(b"".join(pieces))
    (message,) = events
    assert isinstance(message, WireMessage)
    assert message.buffers == [Buffer(bytes(CHUNK_BYTES)), Buffer(b"12345")]


@pytest.mark.parametrize(
    "offsets", [{1: -1}, {1: 1}, {2: CHUNK_BYTES - 4}, {0: 0}, {3: 0}, {2: 1 << 62}]
)
def test_a_grant_of_memory_that_is_none_is_refused(offsets: dict[int, int]) -> None:
    memory = Memory(CHUNK_BYTES)
    number = memory.offered({})
    with pytest.raises(ValueError, match=r"beyond a memory|a grant names part"):
        memory.writer.on_grant(number, (), offsets)


@pytest.mark.parametrize(("offsets", "length"), [({}, 1), ({1: 0}, CHUNK_BYTES + 1), ({2: 0}, 5)])
def test_what_is_said_to_be_written_and_cannot_be_ends_the_connection(
    offsets: dict[int, int], length: int
) -> None:
    memory = Memory(CHUNK_BYTES)
    number = memory.offered(offsets)
    memory.writer.on_grant(number, (), {})
    head = b"".join(memory.writer.take(1))  # the header of the message, which is sent
    memory.feed(head)
    with pytest.raises(ValueError, match=r"are due|are to be sent"):
        memory.feed(
            bytes([8, 0, 0, 0]) + number.to_bytes(4, "little") + length.to_bytes(4, "little")
        )


@pytest.mark.thorough
@pytest.mark.parametrize("left", range(6))
async def test_a_process_out_of_descriptors_keeps_none_of_a_neighbour(
    ends: Ends, left: int
) -> None:
    address = Address("127.0.0.1", ends.port, ends.identity.fingerprint)
    gc.collect()  # what tests before this one left open
    before = sockets_and_memories()
    with no_descriptors_but(left), suppress(OSError):
        found = same_host.dialled(address, ReceiveMemory(1 << 28))
        assert found is not None
        found[0].close()
        assert left == 5
        del found
    gc.collect()
    assert sockets_and_memories() <= before


def sockets_and_memories() -> set[tuple[int, int]]:
    """Device and inode of those that are open: each has its own."""
    found = set()
    for number in open_descriptors():
        with suppress(OSError):  # the listing's own, and what another thread closes meanwhile
            about, link = os.fstat(number), Path(f"/proc/self/fd/{number}").readlink()
            if stat.S_ISSOCK(about.st_mode) or str(link).startswith("/memfd:"):
                found.add((about.st_dev, about.st_ino))
    return found


def open_descriptors() -> list[int]:
    """Those of this process, one of which is of the listing itself."""
    return sorted(int(each.name) for each in Path("/proc/self/fd").iterdir())


@contextmanager
def no_descriptors_but(left: int) -> Iterator[None]:
    """Have the system give this process so many descriptors more, and no others."""
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    taken = [os.open(os.devnull, os.O_RDONLY)]
    most = max(open_descriptors()) + 8
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, limits[1]))
    try:
        with suppress(OSError):
            while True:
                taken.append(os.open(os.devnull, os.O_RDONLY))
        for _ in range(left):
            os.close(taken.pop())
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
        for fd in taken:
            os.close(fd)
