"""A real file system without room: a batch waits, loses nothing, and goes on once there is some."""

import asyncio
from io import BytesIO
from pathlib import Path

import pytest

from inlay.base.errors import OverloadedError
from inlay.store.kept.contents import Contents
from inlay.store.kept.directory import DirectoryStorage
from inlay_state.kept import Kept
from tests.batches.test_runner import Place, check_whole, lines
from tests.engine.torch.test_tier_disk_full import small_disk


async def test_a_batch_on_a_full_disk_waits_and_loses_nothing(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_disk(tmp_path / "disk") as full:
        storage = DirectoryStorage(tmp_path / "disk" / "store", "--batch-store")
        place = Place(storage)
        try:
            await place.create(lines(400, [3]))
            async with place.owned("one", turns=3) as (runner, work):
                with full():
                    running = asyncio.create_task(runner.run())
                    await work.reached(8)
                    async with asyncio.timeout(60):
                        while "no room left" not in caplog.text:  # noqa: ASYNC110
                            await asyncio.sleep(0.01)
                    with pytest.raises(OverloadedError, match="no room left"):
                        await storage.write("more", BytesIO(bytes(1 << 20)))
                    done = (await place.record()).done
                assert not running.done()
                await running
            assert sum(stop - start for start, stop in done) < 400
            await check_whole(place, 400, [3])
        finally:
            storage.close()


async def test_a_response_on_a_full_disk_is_refused_and_leaves_nothing(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk") as full:
        storage = DirectoryStorage(tmp_path / "disk" / "store", "--response-store")
        kept = Kept(storage, Contents(storage), max_bytes=1 << 30, owner_bytes=1 << 30, ttl=100)
        try:
            with full(), pytest.raises(OverloadedError, match="--response-store has no room left"):
                await kept.write("owner", "input", bytes(3 << 20))
            assert await storage.contents() == set()
            assert await kept.read(await kept.write("owner", "input", b"a")) == b"a"
        finally:
            storage.close()
