"""Credit: what fits is sent without asking, more is refused, and it comes back when it is needed."""

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from itertools import count
from typing import Any

import msgspec
import pytest

from inlay.messages.prompt import Buffer
from inlay.transport import ReceiveMemory, TcpPeer
from inlay.transport.credit import CREDIT_BYTES, Credit
from inlay.transport.events import Offered
from inlay.transport.wire import CHUNK_BYTES, FrameKind, FrameReader, FrameWriter
from tests.transport.test_neighbours import until
from tests.transport.test_transport import Ends, Note

LIMIT = 1 << 28
MEGABYTE = 1 << 20


def large(text: str, size: int = MEGABYTE) -> Note:
    return Note(text, (Buffer(os.urandom(size)),))


@contextmanager
def frames_of(connection: TcpPeer[Any]) -> Iterator[list[FrameKind]]:
    """Kinds of the frames that a connection sends, but for signs of life."""
    found: list[FrameKind] = []
    before = connection._writer._frame

    def noted(kind: FrameKind, number: int, body: bytes) -> None:
        if kind != FrameKind.PING:
            found.append(kind)
        before(kind, number, body)

    connection._writer._frame = noted  # type: ignore[method-assign]
    try:
        yield found
    finally:
        connection._writer._frame = before  # type: ignore[method-assign]


async def with_credit(ends: Ends) -> tuple[TcpPeer[Any], TcpPeer[Any]]:
    """Two ends, of which the first has credit."""
    ours, theirs = await ends.pair()
    ours.send(large("first"))
    await theirs.receive()
    await until(lambda: ours._writer._credit)
    return ours, theirs


async def test_what_fits_is_sent_unasked_and_credit_is_renewed() -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await with_credit(ends)
        with frames_of(ours) as sent, frames_of(theirs) as answered:
            for number in range(12):
                note = large(str(number))
                ours.send(note)
                assert await theirs.receive() == note
        assert sent == 12 * [FrameKind.UNASKED]
        assert set(answered) == {FrameKind.CREDIT}
        assert ends.memory.used <= CREDIT_BYTES + 2 * (MEGABYTE + 100)


async def test_what_does_not_fit_or_may_be_there_is_offered() -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await with_credit(ends)
        shared, named = Buffer(os.urandom(MEGABYTE)), Buffer(os.urandom(MEGABYTE), "pe-1/0")
        with frames_of(ours) as sent:
            ours.send(large("more than all credit", CREDIT_BYTES))
            ours.send(Note("named", (named,)))
            ours.send(Note("once", (shared,)))
            ours.send(Note("twice", (shared,)))
            notes = [await theirs.receive() for _ in range(4)]
        assert sent == [FrameKind.OFFER, FrameKind.OFFER, FrameKind.UNASKED, FrameKind.OFFER]
        once, twice = (next(n for n in notes if n.text == text) for text in ("once", "twice"))
        assert once.data[0] is twice.data[0], "it was sent once"


async def test_small_messages_are_not_held_up_by_one_that_is_sent_unasked() -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await with_credit(ends)
        ours.send(large("large", 3 * MEGABYTE))
        ours.send(Note("small"))
        assert [(await theirs.receive()).text for _ in range(2)] == ["small", "large"]


async def test_one_that_was_sent_unasked_can_be_withdrawn() -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await with_credit(ends)
        number = ours.send(large("withdrawn", 3 * MEGABYTE))
        assert ours.withdraw(number)
        ours.send(Note("small"))
        assert await theirs.receive() == Note("small")
        assert ends.memory.used <= CREDIT_BYTES + MEGABYTE + 100


async def test_who_sends_more_than_was_granted_is_cut_off_and_others_are_not() -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await with_credit(ends)
        others = await ends.pair()
        ours._writer.on_credit(100 * MEGABYTE)
        ours.send(large("too much", CREDIT_BYTES + 1))
        with pytest.raises(EOFError):
            await theirs.receive()
        note = large("neighbour")
        others[0].send(note)
        assert await others[1].receive() == note
        others[0].abort()
        with pytest.raises(EOFError):
            await others[1].receive()
        await until(lambda: not ends.memory.used)


@pytest.mark.parametrize("frame", [FrameKind.UNASKED, FrameKind.RETURNED])
async def test_nothing_is_taken_unasked_without_credit(frame: FrameKind) -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await ends.pair()
        body = msgspec.msgpack.encode(((MEGABYTE,), ("",)))
        ours._writer._frame(frame, 1, body if frame is FrameKind.UNASKED else b"")
        ours._flush_soon()
        with pytest.raises(EOFError):
            await theirs.receive()
        assert ends.memory.used == 0


async def test_idle_credit_is_asked_back(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("inlay.transport.connection.PING_SECONDS", 0.05)
    monkeypatch.setattr("inlay.transport.credit.IDLE_SECONDS", 0.2)
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await with_credit(ends)
        await until(lambda: not ends.memory.used)
        assert ours._writer._credit == 0
        with frames_of(ours) as sent:
            ours.send(large("after"))
            await theirs.receive()
        assert sent == [FrameKind.OFFER]


@pytest.mark.thorough
async def test_a_message_that_finds_no_room_has_the_credit_of_all() -> None:
    limit = 10 * CREDIT_BYTES
    async with Ends.open(limit) as ends:
        ours, theirs = await with_credit(ends)
        await until(lambda: ends.memory.used == CREDIT_BYTES)
        other, heard = await ends.pair()
        with frames_of(ours) as sent:
            note = large("all there is", limit - 1000)
            other.send(note)
            got = await heard.receive()
            assert got == note
            ours.send(large("waits"))
            await asyncio.sleep(0.1)
            del got
            assert (await theirs.receive()).text == "waits"
        assert sent == [FrameKind.RETURNED, FrameKind.OFFER]


async def test_a_message_that_is_offered_by_an_older_version_brings_no_credit() -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await ends.pair()
        before, kinds = ours._writer._frame, [FrameKind.OFFER]

        def older(kind: FrameKind, number: int, body: bytes) -> None:
            kinds.append(kind)
            offer = msgspec.msgpack.decode(body)[:2] if kind == FrameKind.OFFER else None
            before(kind, number, body if offer is None else msgspec.msgpack.encode(offer))

        ours._writer._frame = older  # type: ignore[method-assign]
        with frames_of(theirs) as answered:
            for number in range(3):
                ours.send(large(str(number)))
                await theirs.receive()
        assert answered == 3 * [FrameKind.GRANT]


def test_an_older_version_reads_an_offer() -> None:
    class Older(msgspec.Struct, frozen=True, array_like=True):
        sizes: tuple[int, ...]
        names: tuple[str, ...]

    writer = FrameWriter()
    writer.put(large("some"))
    (frame,) = writer.take(1)
    assert msgspec.msgpack.decode(bytes(frame[12:]), type=Older).sizes[1] == MEGABYTE


async def test_many_connections_have_little_of_the_memory() -> None:
    memory = ReceiveMemory(8 * 5 * CREDIT_BYTES)
    said: list[int] = []
    given = [Credit(memory, said.append) for _ in range(1000)]
    for credit in given:
        credit.extend(MEGABYTE)
    assert memory.used == sum(credit.left for credit in given) == 5 * CREDIT_BYTES
    for credit in given:
        credit.close()
    assert memory.used == 0


async def test_credit_is_an_upper_bound_whatever_is_sent() -> None:
    memory = ReceiveMemory(LIMIT)
    credit = Credit(memory, lambda num_bytes: None)
    credit.extend(CHUNK_BYTES)
    held = [credit.spend((100, MEGABYTE)) for _ in range(CREDIT_BYTES // MEGABYTE - 1)]
    assert memory.used == CREDIT_BYTES
    with pytest.raises(ValueError, match="is sent unasked"):
        credit.spend((100, MEGABYTE))
    with pytest.raises(ValueError, match="not asked back"):
        credit.on_revoked()
    credit.revoke()
    credit.extend(MEGABYTE)
    left = MEGABYTE - 100 * len(held)
    assert credit.left == left, "nothing is granted until all has come back"
    credit.on_revoked()
    assert memory.used == CREDIT_BYTES - left
    del held
    await asyncio.sleep(0)
    assert memory.used == 0


def test_a_peer_that_does_not_read_has_one_answer_of_its_credit_wait() -> None:
    writer = FrameWriter()
    for _ in range(3):
        writer.on_credit(CREDIT_BYTES)
        writer.on_credit(0)
        waiting = writer.queued_bytes
        with pytest.raises(ValueError, match="asked back twice"):
            writer.on_credit(0)
        assert writer.queued_bytes == waiting
        writer.take(1)


def test_chunks_never_overtake_the_word_that_they_come() -> None:
    writer = FrameWriter()
    writer.on_credit(CREDIT_BYTES)
    for number in range(100):
        writer.put(Note(f"before {number}"))
    writer.put(large("large"))
    left: list[int] = []
    while pieces := writer.take(1):
        left += [bytes(piece[:1])[0] for piece in pieces if len(piece) < 1000]
    assert left[:101] == 100 * [FrameKind.MESSAGE] + [FrameKind.UNASKED]
    assert set(left[101:]) >= {FrameKind.CHUNK}


def test_an_unasked_message_has_its_memory_before_its_first_chunk_is_read() -> None:
    writer, numbers = FrameWriter(), count()
    reader = FrameReader(lambda *of: None, LIMIT)
    writer.on_credit(CREDIT_BYTES)
    with ExitStack() as stack:
        stack.callback(reader.clear)
        writer.put(large("whole", 2 * CHUNK_BYTES))
        data = memoryview(b"".join(b"".join(writer.take(1)) for _ in range(5)))
        events = []
        while data:
            place = reader.buffer()
            size = min(len(place), len(data))
            place[:size] = data[:size]
            data = data[size:]
            for event in reader.advance(size):
                events.append(next(numbers))
                if isinstance(event, Offered):
                    assert event.unasked
                    parts = [memoryview(bytearray(each)) for each in event.offer.sizes]
                    reader.accept(event.number, list(parts), event.offer.names)
        assert events == [0, 1]
