"""Direct connections: what is sent arrives, whatever its size and however it is cut.

Strangers get nothing.
"""

import asyncio
import os
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.messages.card import Address
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.transport import Listener, ReceiveMemory, TcpPeer, dial
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.events import Offered, WireMessage, Withdrawn
from inlay.transport.handshake import Handshake, HandshakeError
from inlay.transport.listener import MAX_UNPROVEN
from inlay.transport.tls import Identity
from inlay.transport.wire import CHUNK_BYTES, MAX_OPEN, MAX_PARTS, FrameReader, FrameWriter
from tests.transport.fleet import identity

SECRET = Secret(bytes(range(32)))
OTHER = Secret(bytes(32))


class Note(msgspec.Struct, frozen=True, tag="note", array_like=True):
    text: str
    data: tuple[Buffer, ...] = ()


class Bye(msgspec.Struct, frozen=True, tag="bye", array_like=True):
    pass


Heard: TypeAlias = Note | Bye


class Pipe:
    """A writer and a reader of frames, with `cut` saying how many bytes each read may bring."""

    def __init__(self) -> None:
        self.writer = FrameWriter()
        self.reader = FrameReader(self.writer.on_grant, 1 << 30)
        self.answers = FrameWriter()
        self.got: list[WireMessage] = []
        self.withdrawn: list[int] = []

    def move(self, cuts: list[int]) -> None:
        while pieces := self.writer.take(1 << 20):
            data = memoryview(b"".join(pieces))
            while data:
                place = self.reader.buffer()
                size = min(len(place), len(data), cuts[0] if cuts else 1 << 20)
                cuts[:] = cuts[1:] + cuts[:1]
                place[:size] = data[:size]
                data = data[size:]
                for event in self.reader.advance(size):
                    self.take(event)

    def take(self, event: object) -> None:
        match event:
            case WireMessage():
                self.got.append(event)
            case Offered(number, offer):
                parts: list[Buffer | memoryview] = [memoryview(bytearray(s)) for s in offer.sizes]
                self.writer.on_grant(number, ())
                message = self.reader.accept(number, parts, offer.names)
                if message is not None:
                    self.got.append(message)
            case Withdrawn(number):
                self.withdrawn.append(number)


SIZES = st.sampled_from([0, 1, 100, 5000, CHUNK_BYTES - 20, CHUNK_BYTES, 3 * CHUNK_BYTES + 7])


@pytest.mark.thorough
@settings(max_examples=60, deadline=None)
@given(
    notes=st.lists(st.lists(SIZES, max_size=3), min_size=1, max_size=5),
    cuts=st.lists(st.integers(1, 70_000), min_size=1, max_size=6),
)
def test_every_message_arrives_whole_however_the_bytes_are_cut(
    notes: list[list[int]], cuts: list[int]
) -> None:
    pipe = Pipe()
    sent = [
        Note(str(n), tuple(Buffer(os.urandom(size), f"{n}/{i}") for i, size in enumerate(sizes)))
        for n, sizes in enumerate(notes)
    ]
    for note in sent:
        pipe.writer.put(note)
    pipe.move(list(cuts))
    found = {
        msgspec.msgpack.decode(message.header)[1]: [bytes(b.view) for b in message.buffers]
        for message in pipe.got
    }
    assert found == {note.text: [bytes(b.view) for b in note.data] for note in sent}


def test_a_small_message_is_not_held_up_by_a_large_one() -> None:
    writer = FrameWriter()
    number = writer.put(Note("large", (Buffer(bytes(100 * CHUNK_BYTES)),)))
    writer.take(1 << 20)
    assert number is not None
    writer.on_grant(number, ())
    before = sum(map(len, writer.take(1)))
    writer.put(Note("small"))
    first, *_ = writer.take(1)
    assert before <= 4 * CHUNK_BYTES + 12
    assert b"small" in bytes(first)


def test_a_large_message_that_was_held_back_is_offered_as_soon_as_another_has_left() -> None:
    pipe = Pipe()
    for number in range(MAX_OPEN + 1):
        pipe.writer.put(Note(str(number), (Buffer(bytes(CHUNK_BYTES)),)))
    pipe.move([1 << 20])
    assert len(pipe.got) == MAX_OPEN + 1
    assert pipe.writer.idle


def test_a_large_message_whose_last_chunk_has_left_cannot_be_withdrawn() -> None:
    writer = FrameWriter()
    number = writer.put(Note("large", (Buffer(bytes(2 * CHUNK_BYTES)),)))
    assert number is not None
    writer.take(1)
    writer.on_grant(number, ())
    left = 0
    while left <= 2 * CHUNK_BYTES:  # the chunks, with the header's
        left += len(writer.take(1)[-1])
    assert not writer.withdraw(number)


@settings(max_examples=200, deadline=None)
@given(data=st.binary(max_size=300))
def test_garbage_ends_a_connection_and_takes_no_memory(data: bytes) -> None:
    reader = FrameReader(lambda number, present, offsets: None, 1 << 20)
    rest = memoryview(data)
    with suppress(ValueError, msgspec.MsgspecError):
        while rest:
            place = reader.buffer()
            assert len(place) <= 1 << 20
            size = min(len(place), len(rest))
            place[:size] = rest[:size]
            rest = rest[size:]
            list(reader.advance(size))


def test_both_ends_prove_the_secret() -> None:
    dialer, listener = Handshake(SECRET, b"f", dials=True), Handshake(SECRET, b"f", dials=False)
    answer = dialer.take(listener.begin())
    assert not listener.take(dialer.begin())
    last = listener.take(answer)
    assert listener.need == 0
    assert not dialer.take(last)
    assert dialer.need == 0


@pytest.mark.parametrize(
    ("secret", "fingerprint"), [(OTHER, b"f"), (SECRET, b"another")], ids=["secret", "certificate"]
)
def test_a_wrong_secret_or_another_certificate_is_no_proof(
    secret: Secret, fingerprint: bytes
) -> None:
    dialer = Handshake(secret, fingerprint, dials=True)
    listener = Handshake(SECRET, b"f", dials=False)
    answer = dialer.take(listener.begin())
    listener.take(dialer.begin())
    with pytest.raises(HandshakeError):
        listener.take(answer)


def test_a_replayed_proof_is_none() -> None:
    dialer, listener = Handshake(SECRET, b"f", dials=True), Handshake(SECRET, b"f", dials=False)
    hello = dialer.begin()
    answer = dialer.take(listener.begin())
    listener.take(hello)
    listener.take(answer)
    again = Handshake(SECRET, b"f", dials=False)
    again.take(hello)
    with pytest.raises(HandshakeError):
        again.take(answer)


def test_what_a_listener_said_cannot_be_reflected_to_it() -> None:
    listener = Handshake(SECRET, b"f", dials=False)
    with pytest.raises(HandshakeError):
        listener.take(listener.begin())


class Ends:
    """A listener and what dials it, over TCP unless as `neighbours`."""

    def __init__(self, limit: int = 1 << 28, *, neighbours: bool = False) -> None:
        self.memory = ReceiveMemory(limit)
        self.accepted: asyncio.Queue[TcpPeer[Heard]] = asyncio.Queue()
        self.cache = EmbedsCache(1 << 26)
        self.identity: Identity = identity()
        self.listener = Listener(
            SECRET,
            Heard,
            self.memory,
            self.accepted.put_nowait,
            tls=self.identity.context,
            fingerprint=self.identity.fingerprint,
            cache=self.cache,
            neighbours=neighbours,
        )
        self.port = 0
        self.opened: list[TcpPeer[Any]] = []

    @classmethod
    @asynccontextmanager
    async def open(cls, limit: int = 1 << 28, *, neighbours: bool = False) -> "AsyncIterator[Ends]":
        ends = cls(limit, neighbours=neighbours)
        ends.port = await ends.listener.listen("127.0.0.1", 0)
        try:
            yield ends
        finally:
            ends.listener.close()
            for connection in ends.opened:
                connection.abort()
            # TLS and sockets are closed in the turns that follow.
            await asyncio.sleep(0.05)

    async def dial(self, secret: Secret = SECRET, fingerprint: bytes | None = None) -> TcpPeer[Any]:
        connection = await dial(
            Address(
                "127.0.0.1",
                self.port,
                self.identity.fingerprint if fingerprint is None else fingerprint,
            ),
            secret,
            Heard,
            ReceiveMemory(1 << 28),
        )
        self.opened.append(connection)
        return connection

    async def pair(self) -> tuple[TcpPeer[Any], TcpPeer[Heard]]:
        ours, theirs = await self.dial(), await self.accepted.get()
        self.opened.append(theirs)
        return ours, theirs


@pytest.fixture
async def ends() -> AsyncIterator[Ends]:
    async with Ends.open() as ends:
        yield ends


async def test_large_and_small_messages_go_both_ways_over_tls(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    data = os.urandom(5_000_000)
    ours.send(Note("large", (Buffer(data), Buffer(b"tail"))))
    ours.send(Note("small"))
    got = [await theirs.receive(), await theirs.receive()]
    assert [note.text for note in got if isinstance(note, Note)] == ["small", "large"]
    assert isinstance(got[1], Note)
    assert bytes(got[1].data[0].view) == data
    theirs.send(got[1])
    back = await ours.receive()
    assert bytes(back.data[0].view) == data
    ours.close()
    with pytest.raises(EOFError):
        await theirs.receive()


async def test_more_large_messages_than_may_be_open_at_a_time_all_arrive(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    for number in range(MAX_OPEN + 40):
        ours.send(Note(str(number), (Buffer(bytes(CHUNK_BYTES + 1)),)))
    got = set()
    for _ in range(MAX_OPEN + 40):
        note = await theirs.receive()
        assert isinstance(note, Note)
        got.add(int(note.text))
    assert got == set(range(MAX_OPEN + 40))


async def test_strangers_that_speak_no_tls_leave_no_trace(ends: Ends) -> None:
    for _ in range(MAX_UNPROVEN + 6):
        _, stranger = await asyncio.open_connection("127.0.0.1", ends.port)
        stranger.write(b"not TLS at all" * 10)
        await stranger.drain()
        stranger.close()
    ours, theirs = await ends.pair()
    ours.send(Note("in"))
    got = await theirs.receive()
    assert isinstance(got, Note)
    assert not ends.listener._unproven


def counted(connection: TcpPeer[Any]) -> Callable[[], int]:
    """A function that returns the bytes the connection has handed to its socket since."""
    writer, total = connection._writer, 0
    take = writer.take

    def counting(limit: int) -> list[Any]:
        nonlocal total
        pieces = take(limit)
        total += sum(map(len, pieces))
        return pieces

    writer.take = counting  # type: ignore[method-assign]
    return lambda: total


async def test_a_buffer_that_is_there_is_not_sent(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    kept = Buffer(os.urandom(1_000_000))
    ends.cache.use("pe-1/0", kept, lasting=True, new=True)
    ours.send(Note("named", (Buffer(bytes(1_000_000), "pe-1/0"),)))
    got = await theirs.receive()
    assert isinstance(got, Note)
    assert got.data[0] is kept


async def test_a_buffer_of_several_messages_is_sent_once(ends: Ends) -> None:
    ours, theirs = await ends.pair()
    shared, own = Buffer(os.urandom(1_000_000)), Buffer(os.urandom(300_000))
    moved = counted(ours)
    withdrawn = ours.send(Note("withdrawn", (shared,)))
    for number in range(8):
        ours.send(Note(str(number), (shared, own) if number == 7 else (shared,)))
    assert ours.withdraw(withdrawn)
    notes = [await theirs.receive() for _ in range(8)]
    assert all(isinstance(note, Note) and note.data[0].view == shared.view for note in notes)
    assert len({id(note.data[0]) for note in notes if isinstance(note, Note)}) == 1
    assert 1_300_000 <= moved() < 1_310_000
    assert not ends.cache.stats.kept_bytes


async def test_messages_that_share_buffers_crosswise_do_not_wait_for_each_other(
    ends: Ends,
) -> None:
    ours, theirs = await ends.pair()
    one, other = Buffer(os.urandom(700_000)), Buffer(os.urandom(700_000))
    ours.send(Note("a", (one, other)))
    ours.send(Note("b", (other, one)))
    ours.send(Note("c", (one,)))
    async with asyncio.timeout(90):
        notes = [await theirs.receive() for _ in range(3)]
    assert [note.text for note in notes if isinstance(note, Note)] == ["a", "b", "c"]


async def test_a_message_over_the_limit_is_refused_and_the_connection_goes_on(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = await ends.pair()
    monkeypatch.setattr(ours._writer, "_max_bytes", 500_000)
    with pytest.raises(InvalidRequestError, match="at most 500000"):
        ours.send(Note("large", (Buffer(bytes(600_000)),)))
    with pytest.raises(InvalidRequestError, match="at most 8191"):
        ours.send(Note("many", tuple(Buffer(b"a") for _ in range(MAX_PARTS))))
    ours.send(Note("small"))
    got = await theirs.receive()
    assert isinstance(got, Note)
    assert got.text == "small"


async def test_a_message_waits_for_memory_and_a_withdrawn_one_makes_room() -> None:
    async with Ends.open(limit=1_500_000) as ends:
        ours, theirs = await ends.pair()
        ours.send(Note("first", (Buffer(bytes(1_000_000)),)))
        first = await theirs.receive()
        second = ours.send(Note("second", (Buffer(bytes(1_000_000)),)))
        third = ours.send(Note("third", (Buffer(bytes(400_000)),)))
        ours.send(Note("small"))
        small = await theirs.receive()
        assert isinstance(small, Note)
        assert small.text == "small"
        assert second is not None
        assert third is not None
        assert ours.withdraw(second)
        got = await theirs.receive()
        assert isinstance(got, Note)
        assert got.text == "third"
        del first, got


async def test_a_peer_that_does_not_read_is_cut_off_and_costs_a_bounded_amount(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.transport.connection.MAX_QUEUED_BYTES", 1 << 20)
    ours, theirs = await ends.pair()
    theirs._transport.pause_reading()  # type: ignore[union-attr]
    for _ in range(4000):
        ours.send(Note("x" * 1000))
        await asyncio.sleep(0)
        if ours._ended is not None:
            break
    with pytest.raises(EOFError):
        await ours.receive()
    assert ours._writer.queued_bytes <= (1 << 20) + 2000


async def test_a_wrong_secret_is_refused_on_both_ends(ends: Ends) -> None:
    with pytest.raises(OverloadedError):
        await ends.dial(OTHER)
    assert ends.accepted.empty()


async def test_a_wrong_certificate_is_refused_before_anything_is_proved(ends: Ends) -> None:
    with pytest.raises(OverloadedError, match="certificate"):
        await ends.dial(fingerprint=bytes(32))
    assert ends.accepted.empty()


async def test_strangers_of_one_address_leave_places_to_members(ends: Ends) -> None:
    """They speak TLS, and prove nothing."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname, context.verify_mode = False, ssl.CERT_NONE
    elsewhere = ("127.0.0.2", 0)
    strangers = [
        asyncio.create_task(
            asyncio.open_connection("127.0.0.1", ends.port, ssl=context, local_addr=elsewhere)
        )
        for _ in range(MAX_UNPROVEN + 6)
    ]
    # Those without a place wait with their TLS handshake.
    await asyncio.wait(strangers, timeout=2)
    ours, theirs = await ends.pair()
    ours.send(Note("in"))
    got = await theirs.receive()
    assert isinstance(got, Note)
    assert len(ends.listener._unproven) <= MAX_UNPROVEN // 2
    for stranger in strangers:
        stranger.cancel()
    for opened in await asyncio.gather(*strangers, return_exceptions=True):
        if isinstance(opened, tuple):
            opened[1].close()


async def test_strangers_are_bounded_in_number_and_time_and_members_are_served_afterwards(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.transport.connection.HANDSHAKE_SECONDS", 0.5)
    listener = Listener(SECRET, Heard, ends.memory, ends.accepted.put_nowait)
    port = await listener.listen("127.0.0.1", 0)
    strangers = [
        (await asyncio.open_connection("127.0.0.1", port))[1] for _ in range(2 * MAX_UNPROVEN)
    ]
    assert len(listener._unproven) <= MAX_UNPROVEN + 1
    for stranger in strangers[:10]:
        stranger.write(b"GET / HTTP/1.1\r\nHost: a-long-enough-line\r\n\r\n")
    await asyncio.gather(
        *(connection.ready for connection in tuple(listener._unproven)), return_exceptions=True
    )
    ours = await dial(Address("127.0.0.1", port, b""), SECRET, Heard, ReceiveMemory(1 << 20))
    theirs = await ends.accepted.get()
    ours.send(Note("in"))
    got = await theirs.receive()
    assert isinstance(got, Note)
    for stranger in strangers:
        stranger.close()
    for end in (ours, theirs):
        end.abort()
    listener.close()
    await asyncio.sleep(0.05)


async def test_a_peer_that_falls_silent_in_the_middle_of_a_message_is_gone(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.transport.connection.PING_SECONDS", 0.05)
    ours, theirs = await ends.pair()
    ours.send(Note("large", (Buffer(bytes(50_000_000)),)))
    ours.send(Note("behind the offer"))
    await theirs.receive()
    ours._transport.pause_reading()  # type: ignore[union-attr]
    ours._timer.cancel()  # type: ignore[union-attr]
    ours._writable = False
    monkeypatch.setattr("inlay.transport.connection.SILENCE_SECONDS", 0.4)
    with pytest.raises(EOFError):
        await theirs.receive()


async def test_a_message_that_trickles_in_is_a_sign_of_life(
    ends: Ends, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("inlay.transport.connection.PING_SECONDS", 0.05)
    ours, theirs = await ends.pair()
    note = Note("large", (Buffer(os.urandom(1_000_000)),))
    waiting = bytearray()
    transport: Any = ours._transport
    write = transport.writelines
    transport.writelines = lambda pieces: waiting.extend(b"".join(pieces))
    ours.send(note)
    write([bytes(waiting)])
    waiting.clear()
    while not waiting:  # noqa: ASYNC110
        await asyncio.sleep(0.001)
    monkeypatch.setattr("inlay.transport.connection.SILENCE_SECONDS", 0.5)
    ours._timer.cancel()  # type: ignore[union-attr]
    for _ in range(12):
        write([bytes(waiting[:1000])])
        del waiting[:1000]
        await asyncio.sleep(0.1)
    transport.writelines = write
    write([bytes(waiting)])
    assert await theirs.receive() == note


async def test_tls_before_1_3_is_not_spoken(ends: Ends) -> None:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises((ssl.SSLError, OSError)):
        await asyncio.open_connection("127.0.0.1", ends.port, ssl=context)
