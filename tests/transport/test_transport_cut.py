"""A connection cut at any byte has brought whole messages in their order; a thousand idle ones."""

import asyncio
import gc
import os
import weakref
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from typing import Any, TypeAlias

import msgspec
import pytest

from inlay.base.errors import OverloadedError
from inlay.messages.card import Address
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.transport import Listener, ReceiveMemory, TcpPeer, dial
from inlay.transport.credit import CREDIT_BYTES
from inlay.transport.wire import CHUNK_BYTES
from tests.transport.fleet import identity

SECRET = Secret(bytes(range(32)))


class Note(msgspec.Struct, frozen=True, tag="note", array_like=True):
    text: str
    data: tuple[Buffer, ...] = ()


Heard: TypeAlias = Note
NOTES = [
    Note("first"),
    Note("some", (Buffer(os.urandom(3000)), Buffer(b""))),
    Note("large", (Buffer(os.urandom(2 * CHUNK_BYTES + 5)), Buffer(b"tail"))),
    *(Note(f"small {number}") for number in range(5)),
    Note("also large", (Buffer(os.urandom(CHUNK_BYTES + 1)),)),
    Note("last"),
]


class Cut:
    """A proxy that closes both sides after so many bytes from the dialling end."""

    def __init__(self, port: int, after: int | None) -> None:
        self._port = port
        self._left = after
        self.passed = 0
        self.positions = [0]
        """Bytes that had passed at the end of each read."""

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Carry one connection."""
        back, on = await asyncio.open_connection("127.0.0.1", self._port)
        returning = asyncio.create_task(_carry(back, writer))
        while data := await reader.read(1 << 16):
            if self._left is not None:
                data = data[: self._left - self.passed]
            self.passed += len(data)
            self.positions.append(self.passed)
            on.write(data)
            await on.drain()
            if self.passed == self._left:
                break
        for each in (on, writer):
            each.close()
            with suppress(OSError):
                await each.wait_closed()
        await returning


async def _carry(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        while data := await reader.read(1 << 16):
            writer.write(data)
            await writer.drain()


@asynccontextmanager
async def listening(
    memory: ReceiveMemory, cut: int | None
) -> "AsyncIterator[tuple[Cut, Address, asyncio.Queue[TcpPeer[Any]]]]":
    accepted: asyncio.Queue[TcpPeer[Any]] = asyncio.Queue()
    listener = Listener(SECRET, Heard, memory, accepted.put_nowait)
    proxy = Cut(await listener.listen("127.0.0.1", 0), cut)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    try:
        yield proxy, Address("127.0.0.1", server.sockets[0].getsockname()[1], b""), accepted
    finally:
        server.close()
        listener.close()


async def exchange(
    memory: ReceiveMemory, cut: int | None, credit: bool = False
) -> tuple[list[Note], Cut]:
    """Send `NOTES`; return what the other end had when the connection ended.

    With `credit` those behind the first large one wait until the other end has given some, and all
    are taken as they come.
    """
    async with asyncio.timeout(60), listening(memory, cut) as (proxy, address, accepted):
        try:
            ours = await dial(address, SECRET, Heard, ReceiveMemory(1 << 20))
        except OverloadedError:
            return [], proxy
        for note in NOTES[:3] if credit else NOTES:
            ours.send(note)
        got: list[Note] = []
        accepting = asyncio.create_task(accepted.get())
        ended = asyncio.create_task(ours.receive())
        await asyncio.wait((accepting, ended), return_when=asyncio.FIRST_COMPLETED)
        if not accepting.done():
            # Cut in the proof of the end that dialled, which had the other's already.
            accepting.cancel()
            with pytest.raises(EOFError):
                await ended
            return [], proxy
        theirs = accepting.result()
        if credit:
            while not ours._writer._credit and not ended.done():  # noqa: ASYNC110
                await asyncio.sleep(0)
            for note in NOTES[3:]:
                ours.send(note)

        def take(note: Note) -> None:
            got.append(note)
            if len(got) == len(NOTES):
                theirs.abort()

        with suppress(EOFError):
            if credit:
                await theirs.deliver(take)
            while len(got) < len(NOTES):
                got.append(await theirs.receive())
        for end in (ours, theirs):
            end.abort()
        with suppress(EOFError):
            await ended
        return got, proxy


async def _uncut(memory: ReceiveMemory, credit: bool) -> Cut:
    got, proxy = await exchange(memory, None, credit)
    assert sorted(got, key=NOTES.index) == NOTES
    return proxy


async def _cut(memory: ReceiveMemory, after: int, credit: bool) -> None:
    got, _ = await exchange(memory, after, credit)
    assert len(got) < len(NOTES)
    # Each is one that was sent, byte for byte, and small ones come in their order.
    small = [note for note in NOTES if "large" not in note.text]
    assert [note for note in got if note in small] == small[: sum(note in small for note in got)]
    assert all(note in NOTES for note in got)


@pytest.mark.thorough
@pytest.mark.parametrize("credit", [False, True], ids=["offered", "unasked"])
async def test_a_connection_cut_anywhere_has_brought_whole_messages(credit: bool) -> None:
    memory = ReceiveMemory(8 * CREDIT_BYTES if credit else 1 << 20)
    proxy = await _uncut(memory, credit)
    total = proxy.passed
    ends = {position + by for position in proxy.positions for by in (-1, 0, 1)}
    cuts = sorted({*ends, *range(1, 400, 7), *range(400, total, total // 60)})
    for after in (after for after in cuts if 0 < after < total):
        await _cut(memory, after, credit)
        if memory.used:
            # Frames of the errors hold what was received, until the last callbacks have run.
            await asyncio.sleep(0.01)
            gc.collect()
            await asyncio.sleep(0)
        assert memory.used == 0, after


@pytest.mark.thorough
async def test_a_dead_connection_holds_no_memory() -> None:
    memory = ReceiveMemory(1 << 20)
    gc.collect()
    gc.disable()
    try:
        async with listening(memory, 200_000) as (_, address, accepted):
            ours = await dial(address, SECRET, Heard, ReceiveMemory(1 << 20))
            theirs = await accepted.get()
            data = Buffer(bytearray(os.urandom(3 * CHUNK_BYTES)))
            waiting = weakref.ref(data)
            ours.send(Note("cut off", (data,)))
            del data
            for end in (ours, theirs):
                with pytest.raises(EOFError):
                    await end.receive()
            await asyncio.sleep(0)
            assert (memory.used, waiting()) == (0, None)
    finally:
        gc.enable()


@pytest.mark.slow
async def test_a_thousand_idle_connections_delay_nobody_and_end_with_their_peers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    # Their handshakes share this event loop with each other.
    monkeypatch.setattr("inlay.transport.listener.HANDSHAKE_SECONDS", 60.0)
    monkeypatch.setattr("inlay.transport.connection.HANDSHAKE_SECONDS", 60.0)
    memory, own = ReceiveMemory(1 << 28), identity()
    accepted: asyncio.Queue[TcpPeer[Any]] = asyncio.Queue()
    listener = Listener(
        SECRET, Heard, memory, accepted.put_nowait, tls=own.context, fingerprint=own.fingerprint
    )
    address = Address("127.0.0.1", await listener.listen("127.0.0.1", 0), own.fingerprint)
    opened: list[TcpPeer[Any]] = []
    for _ in range(50):
        opened += await asyncio.gather(
            *(dial(address, SECRET, Heard, ReceiveMemory(1 << 20)) for _ in range(20))
        )
    served = [await accepted.get() for _ in opened]
    ours = await dial(address, SECRET, Heard, ReceiveMemory(1 << 20))
    theirs = await accepted.get()
    async with asyncio.timeout(60):
        ours.send(NOTES[2])
        assert await theirs.receive() == NOTES[2]
        # Long enough for each to be silent, were idle ones not heard of.
        await asyncio.sleep(4)
        for idle in opened:
            idle.send(Note("there"))
        for idle in served:
            assert await idle.receive() == Note("there")
        for idle in opened:
            idle.close()
        for idle in served:
            with pytest.raises(EOFError):
                await idle.receive()
    for end in (ours, theirs, *served):
        end.abort()
    listener.close()
    await asyncio.sleep(0.05)
