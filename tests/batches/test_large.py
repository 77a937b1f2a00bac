"""A batch of many lines takes little memory of a frontend.

`BATCH_LINES=1000000 pytest tests/batches/test_large.py` runs as many as a batch may have by default;
by itself it has fewer, as a million take minutes, and a bound for each line.
"""

import asyncio
import json
import os
import tempfile
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO, TypeVar

import pytest

from inlay.store.kept.contents import Contents
from inlay.store.kept.directory import DirectoryStorage
from inlay.store.kept.lease import Held
from inlay_batches.lines import LineRequest, Outcome, answered, usage_of
from inlay_batches.records import decode_batch
from inlay_batches.runner import BatchRunner, Pace
from tests.batches.fakes import Echo
from tests.batches.test_runner import OWNER, Place, line
from tests.serving import peak_growth

T = TypeVar("T")
MIB = 1 << 20
LINES = int(os.environ.get("BATCH_LINES", "400000"))
ANSWER = b'{"object":"list","data":[],"usage":{"prompt_tokens":2,"completion_tokens":1}}'


class Large(Echo):
    """Answers at once, and remembers nothing."""

    max_lines = max(LINES, 20_000)

    async def answer(self, number: int, request: LineRequest) -> Outcome:
        await asyncio.sleep(0)
        return answered(
            self._batch, number, request.custom_id, 200, "req_1", ANSWER, usage_of(ANSWER)
        )

    async def prepare(self, size: int, work: Callable[[], T], /) -> T:
        return await asyncio.to_thread(work)


def written(file: BinaryIO, count: int) -> int:
    for number in range(count):
        file.write(line(f"id-{number}"))
    size = file.tell()
    file.seek(0)
    return size


async def run(place: Place, count: int) -> None:
    with tempfile.TemporaryFile() as file:
        size = written(file, count)
        await place.create_from(file, size)
    files = place.files()
    revision, _ = await place.storage.find(place.name)
    held = await Held.take(
        place.storage, place.name, revision, await place.record(), "one", decode_batch
    )
    assert held is not None
    work = Large(files, OWNER, place.id)
    await BatchRunner(
        held, Contents(place.storage), work, Pace(inflight=128), lambda: place.now
    ).run()


@pytest.mark.parametrize(
    "count", [20_000, pytest.param(LINES, marks=[pytest.mark.slow, pytest.mark.timeout(900)])]
)
def test_many_lines_take_little_memory(count: int, tmp_path: Path) -> None:
    """What stays of a line is a digest of its id: 20 bytes, and 16 while they are sorted.

    With 400,000 lines, one string kept of each would be beyond the bound, which is 64 MB for 10^6
    lines. What an allocator holds beyond what is used differs by some MB from run to run.
    """
    complete(tmp_path / "few", 20_000)  # takes what is taken once
    grown = complete(tmp_path / "many", count)
    assert grown < 8 * MIB + 56 * count


def complete(directory: Path, count: int) -> int:
    """Run a batch, check its answers, and return the bytes of memory it took at most."""
    storage = DirectoryStorage(directory, "--batch-store")
    place = Place(storage)
    try:
        with peak_growth(os.getpid()) as grown:
            asyncio.run(run(place, count))
        found: Counter[str] = Counter()

        async def read() -> str:
            record = await place.record()
            assert (record.total, record.completed, record.failed) == (count, count, 0)
            file = await place.files().get(OWNER, str(record.output_file_id))
            rest = b""
            async for piece in place.files().read(file):
                *lines, rest = (rest + piece).split(b"\n")
                found.update(json.loads(each)["custom_id"] for each in lines)
            return record.status

        assert asyncio.run(read()) == "completed"
        assert len(found) == count
        assert found.total() == count
    finally:
        storage.close()
    return grown[0]
