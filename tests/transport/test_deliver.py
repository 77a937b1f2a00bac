"""Messages taken as they come: in order, until the end or a fault of who takes them."""

import asyncio
import os
from collections.abc import Callable
from typing import Any

import pytest

from inlay.messages.prompt import Buffer
from inlay.transport import TcpPeer
from tests.transport.test_neighbours import until
from tests.transport.test_transport import Ends, Note

LIMIT = 1 << 28


def notes() -> list[Note]:
    large = [Note(f"large {size}", (Buffer(os.urandom(size)),)) for size in (200_000, 3 << 20)]
    return [Note("small"), large[0], Note("other"), large[1], Note("last")]


@pytest.mark.thorough
async def test_what_waits_is_taken_first_and_all_in_order() -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await ends.pair()
        early, late = notes()[:1], notes()
        for note in early:
            ours.send(note)
        await until(lambda: theirs._arrived)
        got: list[Any] = []
        taking = asyncio.create_task(theirs.deliver(got.append))
        for note in late:
            ours.send(note)
            # A large one gives way to small ones; here none passes it.
            await until(lambda: ours._writer.idle)
        await until(lambda: len(got) == len(early) + len(late))
        assert got == early + late
        ours.close()
        with pytest.raises(EOFError):
            await taking


@pytest.mark.thorough
async def test_a_message_is_taken_in_the_turn_in_which_it_is_read() -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await ends.pair()
        reading, taken = False, []
        updated = theirs.buffer_updated

        def read(count: int) -> None:
            nonlocal reading
            reading = True
            updated(count)
            reading = False

        theirs.buffer_updated = read  # type: ignore[method-assign, assignment]
        taking = asyncio.create_task(theirs.deliver(lambda _: taken.append(reading)))
        await asyncio.sleep(0)
        ours.send(Note("now"))
        # It has left before this turn ends.
        assert ours._writer.idle
        await until(lambda: taken)
        assert taken == [True]
        taking.cancel()


@pytest.mark.parametrize("error", [ValueError, RuntimeError])
async def test_a_fault_of_who_takes_is_raised_and_nothing_more_is_taken(
    error: Callable[[str], Exception],
) -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await ends.pair()
        got: list[str] = []

        def take(note: Any) -> None:
            got.append(note.text)
            raise error(note.text)

        taking = asyncio.create_task(theirs.deliver(take))
        for text in ("first", "second"):
            ours.send(Note(text))
        with pytest.raises(Exception, match=r"^first$") as raised:
            await taking
        assert type(raised.value) is error
        await until(lambda: theirs._arrived)
        assert got == ["first"]


async def test_who_takes_may_end_the_connection() -> None:
    async with Ends.open(LIMIT) as ends:
        ours, theirs = await ends.pair()
        got: list[str] = []

        def take(note: Any) -> None:
            got.append(note.text)
            theirs.abort()

        # Together: the second is read with the first.
        for text in ("first", "second"):
            ours._writer.put(Note(text))
        taking = asyncio.create_task(theirs.deliver(take))
        await asyncio.sleep(0)
        ours.send(Note("third"))
        with pytest.raises(EOFError):
            await taking
        assert got == ["first"]
        await _gone(ours)


async def _gone(connection: TcpPeer[Any]) -> None:
    async with asyncio.timeout(20):
        with pytest.raises(EOFError):
            await connection.receive()
