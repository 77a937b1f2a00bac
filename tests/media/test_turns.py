"""Places of fetches: shared by clients, never all taken by one, and given back in every way."""

import asyncio
import contextlib
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.base.slots import Slots
from inlay.media.fetch import Fetcher, FetchSettings
from tests.media.test_fetch import HOST, say, serving


async def settle() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


class Client:
    """Holders of places that stay until they are told to go."""

    def __init__(self, turns: Slots, name: str) -> None:
        self.name = name
        self.open = 0
        self.tasks: list[asyncio.Task[None]] = []
        self._turns = turns

    def ask(self, count: int = 1) -> None:
        self.tasks += [asyncio.create_task(self._hold()) for _ in range(count)]

    async def _hold(self) -> None:
        async with self._turns.taken(self.name):
            self.open += 1
            try:
                await asyncio.Event().wait()
            finally:
                self.open -= 1

    async def leave(self) -> None:
        for task in self.tasks:
            task.cancel()
        await asyncio.gather(*self.tasks, return_exceptions=True)
        self.tasks.clear()


async def test_a_client_has_no_more_than_remain_for_others() -> None:
    turns = Slots(12)
    one, two, three = (Client(turns, name) for name in "abc")
    one.ask(100)
    await settle()
    assert one.open == 6
    two.ask(100)
    await settle()
    assert (one.open, two.open) == (6, 3)
    await one.leave()
    one.ask(100)
    await settle()
    # What one has left the other takes, as far as as many remain; nobody is put out.
    assert (one.open, two.open) == (3, 6)
    three.ask(100)
    await settle()
    assert three.open == 2
    for client in (one, two, three):
        await client.leave()
    assert turns.free == 12


async def test_a_single_place_goes_from_hand_to_hand() -> None:
    turns = Slots(1)
    one, two = Client(turns, "a"), Client(turns, "b")
    one.ask(2)
    two.ask(2)
    await settle()
    assert (one.open, two.open) == (1, 0)
    await one.leave()
    assert two.open == 1
    await two.leave()
    assert turns.free == 1


@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["ask", "end", "settle"]))))
def test_places_are_neither_lost_nor_made(steps: list[tuple[int, str]]) -> None:
    async def run() -> None:
        turns, places = Slots(5), 5
        clients = [Client(turns, str(number)) for number in range(4)]
        for number, step in steps:
            client = clients[number]
            if step == "ask":
                client.ask()
            elif step == "end" and client.tasks:
                client.tasks.pop(0).cancel()
            else:
                await settle()
            assert turns.free + sum(turns._open.values()) == places
            assert max(Counter(turns._open).values(), default=0) <= 3
        for client in clients:
            await client.leave()
        await settle()
        assert turns.free == places
        assert not len(turns._waiting)

    asyncio.run(run())


async def test_slow_urls_of_one_client_do_not_hold_those_of_another() -> None:
    never = asyncio.Event()

    async def silent(path: str, writer: asyncio.StreamWriter) -> None:
        await never.wait()

    settings = FetchSettings(http=True, private_networks=(f"{HOST}/32",), places=8, seconds=3600)
    async with serving(silent) as slow, serving(say(body=b"picture")) as quick:
        fetcher = Fetcher(settings)
        attack = [
            asyncio.create_task(fetcher.fetch(f"http://{HOST}:{slow.port}/{n}", client="a"))
            for n in range(200)
        ]
        while slow.connections < 4:  # noqa: ASYNC110  # nobody tells
            await asyncio.sleep(0.01)
        for client in ("b", "c", "b"):
            url = f"http://{HOST}:{quick.port}/"
            assert await fetcher.fetch(url, client=client) == b"picture"
        assert slow.connections == 4
        assert not any(task.done() for task in attack)
        for task in attack:
            task.cancel()
        await asyncio.gather(*attack, return_exceptions=True)
        assert fetcher._turns.free == 8
        never.set()


async def test_names_that_are_slow_to_resolve_keep_their_places_until_they_are() -> None:
    resolved = asyncio.Event()

    async def resolve(host: str, port: int) -> list[str]:
        if host == "slow.test":
            await resolved.wait()
        return [HOST]

    settings = FetchSettings(http=True, private_networks=(f"{HOST}/32",), places=4, seconds=0.05)
    async with serving(say(body=b"picture")) as server:
        fetcher = Fetcher(settings, resolve=resolve)
        slow = f"http://slow.test:{server.port}/"
        for _ in range(2):
            with pytest.raises(InvalidRequestError, match="cannot be fetched"):
                await fetcher.fetch(slow, client="a")
        # Its lookups go on, so a third waits for its turn; others have theirs.
        third = asyncio.create_task(fetcher.fetch(slow, client="a"))
        patient = Fetcher(FetchSettings(http=True, private_networks=(f"{HOST}/32",)))
        patient._turns = fetcher._turns
        url = f"http://{HOST}:{server.port}/"
        assert await patient.fetch(url, client="b") == b"picture"
        assert fetcher._turns.free == 2
        assert not third.done()
        resolved.set()
        with contextlib.suppress(InvalidRequestError):  # where 0.05 s are not enough here
            assert await third == b"picture"
        await settle()
        assert fetcher._turns.free == 4
