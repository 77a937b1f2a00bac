"""What NATS keeps of stored prompts.

Records by compare-and-set, contents that are whole or not there.
"""

import asyncio
import io
import secrets
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from pathlib import Path

import pytest

from inlay.base.errors import OverloadedError
from inlay.transport.nats import prompts as prompts_module
from inlay.transport.nats.member import Member
from inlay.transport.nats.prompts import CHUNK_BYTES, NatsPrompts
from tests.transport.nats_server import NatsServer


class Joined:
    """Members of one namespace."""

    def __init__(self, server: NatsServer, stack: AsyncExitStack) -> None:
        self._settings = server.settings(secrets.token_hex(8))
        self._stack = stack

    async def prompts(self) -> NatsPrompts:
        member = await Member.join(self._settings, "frontend")
        self._stack.push_async_callback(member.leave)
        return await NatsPrompts.open(member)


@pytest.fixture
async def joined(nats_server: NatsServer) -> AsyncIterator[Joined]:
    async with AsyncExitStack() as stack:
        yield Joined(nats_server, stack)


async def test_of_those_who_change_a_record_at_the_same_time_one_wins(joined: Joined) -> None:
    one, other = await joined.prompts(), await joined.prompts()
    assert await one.find("a.b") == (0, None)
    won = await asyncio.gather(
        *(member.swap("a.b", bytes([n]), 0) for n in range(4) for member in (one, other))
    )
    assert sum(won) == 2
    revision, record = await other.find("a.b")
    # Members that write the same are all told that it is there.
    assert record is not None
    assert won[2 * record[0] : 2 * record[0] + 2] == [True, True]
    assert await one.swap("a.b", b"new", revision)
    assert not await other.swap("a.b", b"late", revision)
    assert not await other.drop("a.b", revision)
    assert (await other.find("a.b"))[1] == b"new"


async def test_a_record_that_was_removed_can_be_made_again_by_whoever_knows_that(
    joined: Joined,
) -> None:
    one = await joined.prompts()
    assert await one.swap("a.b", b"first", 0)
    revision, _ = await one.find("a.b")
    assert await one.drop("a.b", revision)
    gone, record = await one.find("a.b")
    assert record is None
    assert not await one.swap("a.b", b"second", revision)
    assert await one.swap("a.b", b"second", gone)
    assert await one.list() == [("a.b", (await one.find("a.b"))[0], b"second")]


async def test_records_are_listed_by_what_they_are_under(joined: Joined) -> None:
    one = await joined.prompts()
    assert await one.list() == []
    for key in ("a.x", "a.y", "b.x"):
        assert await one.swap(key, key.encode(), 0)
    assert await one.swap("alone", b"", 0)
    assert {(key, record) for key, _, record in await one.list("a")} == {
        ("a.x", b"a.x"),
        ("a.y", b"a.y"),
    }
    assert {key for key, _, _ in await one.list()} == {"a.x", "a.y", "b.x"}


@pytest.mark.parametrize("size", [0, 1, 4096, CHUNK_BYTES, 3 * CHUNK_BYTES + 17])
async def test_a_content_comes_back_at_every_member_until_it_is_erased(
    joined: Joined, size: int
) -> None:
    one, other = await joined.prompts(), await joined.prompts()
    data = secrets.token_bytes(size)
    assert await one.write("first", io.BytesIO(data)) == size
    assert await one.write("second", io.BytesIO(data[::-1])) == size
    read = io.BytesIO()
    assert await other.read("first", size, read)
    assert read.getvalue() == data
    assert (await one.size())[0] > 2 * size
    await other.erase("first")
    assert await one.contents() == ({"second"} if size else set())
    assert not await one.read("first", size + 1, io.BytesIO())
    assert await one.read("second", size, io.BytesIO())


async def test_a_content_that_is_not_whole_is_not_read(joined: Joined) -> None:
    one = await joined.prompts()

    class Torn(io.BytesIO):
        def read(self, size: int | None = -1) -> bytes:
            if self.tell() >= CHUNK_BYTES:
                raise OSError("torn")
            return super().read(size)

    with pytest.raises(OSError, match="torn"):
        await one.write("torn", Torn(bytes(3 * CHUNK_BYTES)))
    assert await one.contents() == {"torn"}
    assert not await one.read("torn", 3 * CHUNK_BYTES, io.BytesIO())
    await one.erase("torn")
    assert await one.contents() == set()


async def test_nats_own_tools_find_the_contents(joined: Joined, nats_server: NatsServer) -> None:
    one = await joined.prompts()
    await one.write("known", io.BytesIO(b"content" * 1000))
    store = await one._control.jetstream.object_store(one._name)
    (info,) = await store.list()
    assert (info.name, info.size) == ("known", 7000)
    assert (await store.get("known")).data == b"content" * 1000


async def test_what_one_removes_the_others_are_told(joined: Joined) -> None:
    one, other = await joined.prompts(), await joined.prompts()
    told: asyncio.Queue[str] = asyncio.Queue()
    await other.listen(told.put_nowait, lambda: None)
    await other.find("a.b")  # so the server knows of the subscription
    one.tell("a.b")
    assert await asyncio.wait_for(told.get(), 30) == "a.b"


async def test_while_nats_is_away_all_wait_and_then_say_so(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    server = NatsServer(tmp_path)
    server.start()
    async with AsyncExitStack() as stack:
        stack.callback(server.kill)
        one = await Joined(server, stack).prompts()
        monkeypatch.setattr(prompts_module, "WAIT_SECONDS", 60.0)
        assert await one.swap("a.b", b"kept", 0)
        await one.write("content", io.BytesIO(b"content"))
        server.kill()
        asking = [
            asyncio.create_task(one.swap("a.c", b"new", 0)),
            asyncio.create_task(one.write("new", io.BytesIO(b"new"))),
        ]
        await asyncio.sleep(0.5)
        server.start()
        # What was asked while it was away is done once it is back.
        assert await asyncio.gather(*asking) == [True, 3]
        assert (await one.find("a.b"))[1] == b"kept"
        assert await one.contents() == {"content", "new"}
        server.kill()
        monkeypatch.setattr(prompts_module, "WAIT_SECONDS", 0.5)
        with pytest.raises(
            OverloadedError, match="NATS does not show what is stored at the moment"
        ):
            await one.find("a.b")
        with pytest.raises(OverloadedError, match="NATS does not keep"):
            await one.write("more", io.BytesIO(b"more"))
