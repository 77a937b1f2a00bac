"""The storages of files and batches are alike: a batch runs over each of them."""

import asyncio
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable
from io import BytesIO
from pathlib import Path
from typing import Any, BinaryIO

import pytest

from inlay.base.errors import InvalidRequestError, OverloadedError, RateLimitedError
from inlay.http.frontend_part import FrontendAccess
from inlay.http.server import Server
from inlay.http.settings import FrontendSettings
from inlay.messages.digest import Secret
from inlay.router import Router
from inlay.store.kept.contents import PIECE_BYTES, Contents
from inlay.store.kept.directory import DirectoryStorage
from inlay.store.kept.memory import MemoryStorage
from inlay.store.settings import BatchSettings, ResponseSettings
from inlay.store.shared import Storage
from inlay.transport.local import LocalPlane
from inlay.transport.nats.member import Member
from inlay.transport.nats.prompts import NatsPrompts
from inlay.transport.nats.subjects import FILES
from inlay_batches import runner
from inlay_batches.files import Files
from inlay_batches.records import BatchRecord, FileRecord, encode
from inlay_batches.service import Batches
from tests.batches.fakes import Echo, Mortal
from tests.batches.test_runner import Place, check_whole, lines
from tests.transport.nats_server import NatsServer

Open = Callable[[], Awaitable[Storage]]


@pytest.fixture(params=["memory", "directory", "nats"])
async def opened(request: pytest.FixtureRequest, tmp_path: Path) -> AsyncIterator[Open]:
    """Opens the same storage, as often as asked; memory is one object."""
    memory = MemoryStorage(1 << 24)
    members: list[Member] = []
    folders: list[DirectoryStorage] = []
    settings: Any = None
    if request.param == "nats":
        server: NatsServer = request.getfixturevalue("nats_server")
        settings = server.settings(secrets.token_hex(8))

    async def open_() -> Storage:
        if request.param == "memory":
            return memory
        if request.param == "directory":
            folders.append(DirectoryStorage(tmp_path / "store", "--batch-store"))
            return folders[-1]
        members.append(await Member.join(settings, "frontend"))
        return await NatsPrompts.open(members[-1], FILES)

    yield open_
    for folder in folders:
        folder.close()
    for member in members:
        await member.leave()


async def test_one_of_several_changes_wins_and_a_late_one_changes_nothing(opened: Open) -> None:
    one, other = await opened(), await opened()
    assert await one.find("a.b") == (0, None)
    won = await asyncio.gather(
        *(each.swap("a.b", b"%d%d" % (n, id(each)), 0) for n in range(4) for each in (one, other))
    )
    assert sum(won) == 1
    revision, _ = await other.find("a.b")
    assert await other.swap("a.b", b"new", revision)
    assert not await one.swap("a.b", b"late", revision)
    assert not await one.drop("a.b", revision)
    later, record = await one.find("a.b")
    assert record == b"new"
    assert await one.drop("a.b", later)
    assert (await other.find("a.b"))[1] is None
    assert not await other.swap("a.b", b"late", later)


async def test_records_are_listed_by_owner_and_contents_are_whole_or_gone(opened: Open) -> None:
    storage = await opened()
    for key in ("a.x", "a.y", "b.x"):
        assert await storage.swap(key, key.encode(), 0)
    assert sorted(key for key, _, _ in await storage.list("a")) == ["a.x", "a.y"]
    assert sorted(record for _, _, record in await storage.list()) == [b"a.x", b"a.y", b"b.x"]
    data = secrets.token_bytes(1_300_000)
    assert await storage.write("0a-file-1", BytesIO(data)) == len(data)
    again = await opened()
    found = BytesIO()
    assert await again.read("0a-file-1", len(data), found)
    assert found.getvalue() == data
    assert not await again.read("0a-file-1", len(data) + 1, BytesIO())
    assert await again.contents() == {"0a-file-1"}
    assert (await again.size())[0] >= len(data)
    await again.erase("0a-file-1")
    await again.erase("0a-file-1")
    assert not await storage.read("0a-file-1", len(data), BytesIO())
    assert await storage.contents() == set()


async def test_a_batch_goes_from_one_owner_to_the_next(opened: Open) -> None:
    place = Place(await opened())
    await place.create(lines(25, [2]))
    async with place.owned("one", await opened(), turns=20) as (runner, work):
        running = asyncio.create_task(runner.run())
        await work.reached(10)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await place.run("two", await opened())
    await check_whole(place, 25, [2])


async def test_a_file_that_does_not_fit_leaves_nothing() -> None:
    storage = MemoryStorage(3 * PIECE_BYTES)
    with pytest.raises(OverloadedError):
        await Contents(storage).write_file("file", BytesIO(bytes(4 * PIECE_BYTES)))
    assert (await storage.contents(), await storage.size()) == (set(), (0, 0))


@pytest.mark.parametrize("bounds", [(3, 9), (9, 3)], ids=["owner", "all"])
async def test_files_that_come_at_once_are_within_the_bounds(
    opened: Open, bounds: tuple[int, int]
) -> None:
    storage = await opened()
    of_owner, of_all = (each * PIECE_BYTES for each in bounds)
    files = Files(storage, Contents(storage), max_bytes=of_all, owner_bytes=of_owner, ttl=60)

    async def create() -> FileRecord:
        size = 2 * PIECE_BYTES
        file = BytesIO(bytes(size))
        return await files.create("a", file, filename="f", purpose="user_data", size=size, ttl=None)

    made = await asyncio.gather(create(), create(), return_exceptions=True)
    assert sorted(isinstance(each, FileRecord) for each in made) == [False, True]
    assert sum(isinstance(each, RateLimitedError | OverloadedError) for each in made) == 1
    (record,) = await files.all_of("a")
    assert await storage.contents() == {piece.name for piece in record.pieces}
    await files.delete("a", record.id)
    await create()


@pytest.mark.parametrize("bounds", [(3, 9), (9, 3)], ids=["owner", "all"])
async def test_two_frontends_that_find_the_same_room_do_not_both_take_it(
    opened: Open, bounds: tuple[int, int]
) -> None:
    both = asyncio.Barrier(2)

    class Late(Mortal):
        async def write(self, name: str, file: BinaryIO) -> int:
            await both.wait()  # the other has looked, too
            return await super().write(name, file)

    storage = await opened()
    of_owner, of_all = (each * PIECE_BYTES for each in bounds)

    async def create(storage: Storage) -> FileRecord:
        files = Files(storage, Contents(storage), max_bytes=of_all, owner_bytes=of_owner, ttl=60)
        size = 2 * PIECE_BYTES
        file = BytesIO(bytes(size))
        return await files.create("a", file, filename="f", purpose="user_data", size=size, ttl=None)

    stores = [Late(await opened(), None), Late(await opened(), None)]
    made = await asyncio.gather(*map(create, stores), return_exceptions=True)
    kept = [each for each in made if isinstance(each, FileRecord)]
    assert sum(isinstance(each, RateLimitedError | OverloadedError) for each in made) == 2 - len(
        kept
    )
    assert len(kept) < 2
    assert len(await storage.list("a")) == len(kept)
    assert await storage.contents() == {piece.name for each in kept for piece in each.pieces}
    if not kept:
        await create(storage)


async def test_two_frontends_that_count_the_same_batches_do_not_both_begin_one(
    opened: Open,
) -> None:
    both = asyncio.Barrier(2)

    class Late(Mortal):
        async def swap(self, key: str, record: bytes, revision: int) -> bool:
            await both.wait()  # the other has counted, too
            return await super().swap(key, record, revision)

    server = Server(Router(LocalPlane([])), FrontendSettings(port=0), Secret(bytes(32)))
    settings = BatchSettings(batch_store="memory", max_batches_per_tenant=2)

    def frontend(storage: Storage) -> Batches:
        part = Batches(FrontendAccess(server, (), settings, ResponseSettings()))
        part.files = Files(storage, Contents(storage), max_bytes=9, owner_bytes=9, ttl=60)
        return part

    def batch(id_: str) -> BatchRecord:
        return BatchRecord(
            id=id_, endpoint="/v1/completions", input_file_id="file-a", window="24h", created_at=0,
            expires_at=1,
        )  # fmt: skip

    storage = await opened()
    one = frontend(storage)
    await one.create("a", batch("batch_a"))
    parts = [frontend(Late(await opened(), None)) for _ in range(2)]
    made = await asyncio.gather(
        *(part.create("a", batch(f"batch_b{n}")) for n, part in enumerate(parts)),
        return_exceptions=True,
    )
    begun = {each.id for each in made if isinstance(each, BatchRecord)}
    assert sum(isinstance(each, RateLimitedError) for each in made) == 2 - len(begun)
    assert len(begun) < 2
    assert {each.id for each in await one.files.all_of("a")} == {"batch_a"} | begun
    if not begun:
        await one.create("a", batch("batch_c"))


async def test_what_batches_have_made_so_far_counts_as_files_do() -> None:
    storage = MemoryStorage(1 << 24)
    files = Files(storage, Contents(storage), max_bytes=1000, owner_bytes=500, ttl=60)
    pieces = tuple([await files.contents.write(f"0a-lines-{n}", bytes(200)) for n in range(2)])
    batch = BatchRecord(
        id="batch_a", endpoint="/v1/completions", input_file_id="file-a", window="24h", created_at=0,
        expires_at=1, output=pieces[:1], error=pieces[1:], status="in_progress",
    )  # fmt: skip
    assert await storage.swap("a.batch_a", encode(batch), 0)
    with pytest.raises(RateLimitedError, match=r"have 400 bytes; 101 more .*--files-tenant-bytes"):
        await files.check_room("a", 101)
    assert await files.has_room("a", 100)
    assert not await files.has_room("a", 101)
    with pytest.raises(OverloadedError, match="--batch-store-bytes"):
        await files.has_room("b", 601)


async def test_a_full_memory_and_a_foreign_directory_are_refused(tmp_path: Path) -> None:
    storage = MemoryStorage(100)
    await storage.write("a", BytesIO(bytes(90)))
    with pytest.raises(OverloadedError, match="--batch-store-bytes"):
        await storage.write("b", BytesIO(bytes(20)))
    await storage.erase("a")
    await storage.write("b", BytesIO(bytes(20)))
    (tmp_path / "open").mkdir(mode=0o755)
    (tmp_path / "open").chmod(0o755)
    with pytest.raises(InvalidRequestError, match="may be read by others"):
        DirectoryStorage(tmp_path / "open", "--batch-store")
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(InvalidRequestError, match="cannot be used"):
        DirectoryStorage(tmp_path / "file", "--batch-store")


@pytest.mark.parametrize("is_cancelled", [False, True])
async def test_a_batch_that_needs_no_more_room_does_not_wait_for_any(
    is_cancelled: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked = asyncio.Event()

    class Full(Echo):
        async def has_room(self, num_bytes: int) -> bool:
            asked.set()
            raise OverloadedError("what all keep is at its limit")

    monkeypatch.setattr(runner, "_RETRY_SECONDS", 0.01)
    place = Place(MemoryStorage(1 << 24))
    # Two pieces at least: behind the first of them there are lines that need room.
    await place.create(lines(8 if is_cancelled else 1))
    async with asyncio.timeout(60), place.owned("one", work=Full) as (batch, _):
        running = asyncio.create_task(batch.run())
        if is_cancelled:
            await asked.wait()
            await place.cancel()
            batch.look()
        await running
    record = await place.record()
    output, error = await place.outputs()
    assert record.status == ("cancelled" if is_cancelled else "completed")
    assert len(output) + len(error) == record.total
