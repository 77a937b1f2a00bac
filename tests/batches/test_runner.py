"""One batch and whatever may happen to it: each input line has exactly one output line."""

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, BinaryIO

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.errors import OverloadedError
from inlay.messages.prompt import Buffer
from inlay.store import NewVectors, PromptStore
from inlay.store.kept.contents import Contents
from inlay.store.kept.directory import DirectoryStorage
from inlay.store.kept.lease import Held, LeaseLostError
from inlay.store.kept.memory import MemoryStorage
from inlay.store.shared import Storage
from inlay_batches.files import Files
from inlay_batches.lines import LineRequest, Outcome
from inlay_batches.records import BatchRecord, FileRecord, decode, decode_batch, encode, new_id
from inlay_batches.runner import BatchRunner, Pace, cancelled
from tests import virtual_time
from tests.batches.fakes import Echo, Killed, Mortal
from tests.examples import examples
from tests.live import SECRET

OWNER = "ab" * 16
PACE = Pace(inflight=3, piece_lines=4, piece_seconds=0.02, renew=0.01)


def line(custom_id: str, url: str = "/v1/embeddings", **body: Any) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": url, "body": {"model": "m", **body}}
    return json.dumps(fields).encode() + b"\n"


def lines(count: int, failing: Sequence[int] = ()) -> bytes:
    return b"".join(
        line(f"id-{index}", status=400 if index in failing else 200) for index in range(count)
    )


class Place:
    """A storage with one batch in it."""

    def __init__(self, storage: Storage, key: bytes | None = None) -> None:
        self.storage = storage
        self.key = key
        self.now = 1000.0
        self.id = new_id("batch_")
        self.name = f"{OWNER}.{self.id}"

    def files(self, storage: Storage | None = None) -> Files:
        storage = storage or self.storage
        return Files(
            storage,
            Contents(storage, self.key),
            max_bytes=1 << 30,
            owner_bytes=1 << 30,
            ttl=1000,
            clock=lambda: self.now,
        )

    async def create(self, data: bytes, window: int = 1000, **fields: Any) -> None:
        await self.create_from(BytesIO(data), len(data), window, **fields)

    async def create_from(
        self, data: BinaryIO, size: int, window: int = 100_000, **fields: Any
    ) -> None:
        file = await self.files().create(
            OWNER, data, filename="a", purpose="batch", size=size, ttl=None
        )
        record = BatchRecord(
            id=self.id,
            endpoint="/v1/embeddings",
            input_file_id=file.id,
            window="24h",
            created_at=int(self.now),
            expires_at=int(self.now) + window,
            input=file.pieces,
            **fields,
        )
        assert await self.storage.swap(self.name, encode(record), 0)

    async def record(self) -> BatchRecord:
        _, kept = await self.storage.find(self.name)
        assert kept is not None
        found = decode(self.name, kept)
        assert isinstance(found, BatchRecord)
        return found

    async def cancel(self) -> None:
        """Cancel the batch as its client does; its runner renews the record meanwhile."""
        while True:
            revision, _ = await self.storage.find(self.name)
            stopped = cancelled(await self.record(), self.now)
            assert stopped.status == "cancelling"
            if await self.storage.swap(self.name, encode(stopped), revision):
                return

    @asynccontextmanager
    async def owned(
        self,
        holder: str,
        storage: Storage | None = None,
        turns: int = 1,
        work: type[Echo] = Echo,
    ) -> AsyncIterator[tuple[BatchRunner, Echo]]:
        storage = storage or self.storage
        files = self.files(storage)
        revision, kept = await storage.find(self.name)
        assert kept is not None
        record = decode(self.name, kept)
        assert isinstance(record, BatchRecord)
        held = await Held.take(storage, self.name, revision, record, holder, decode_batch)
        assert held is not None
        made = work(files, OWNER, self.id, turns=turns)
        yield BatchRunner(held, files.contents, made, PACE, lambda: self.now), made

    async def run(self, holder: str = "one", storage: Storage | None = None) -> Echo:
        async with self.owned(holder, storage) as (runner, work):
            await runner.run()
        return work

    async def read(self, id_: str | None) -> list[dict[str, Any]]:
        if id_ is None:
            return []
        file = await self.files().get(OWNER, id_)
        assert isinstance(file, FileRecord)
        data = b"".join([piece async for piece in self.files().read(file)])
        assert len(data) == file.size
        return [json.loads(each) for each in data.splitlines()]

    async def outputs(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        record = await self.record()
        return await self.read(record.output_file_id), await self.read(record.error_file_id)


def run(act: Callable[[Place], Any], storage: Storage | None = None) -> None:
    asyncio.run(act(Place(storage or MemoryStorage(1 << 24))))


async def check_whole(place: Place, count: int, failing: Sequence[int] = ()) -> None:
    record = await place.record()
    output, error = await place.outputs()
    assert record.status == "completed"
    found = Counter(each["custom_id"] for each in (*output, *error))
    assert found == Counter(f"id-{index}" for index in range(count))
    assert {each["custom_id"] for each in error} == {f"id-{index}" for index in failing}
    assert len({each["id"] for each in (*output, *error)}) == count
    assert (record.total, record.completed, record.failed) == (
        count,
        count - len(failing),
        len(failing),
    )
    assert record.usage.input == 2 * (count - len(failing))
    assert record.done == ((0, count),)


@settings(max_examples=examples(150), deadline=None)
@given(
    count=st.integers(1, 30),
    failing=st.sets(st.integers(0, 29), max_size=4),
    kills=st.lists(st.tuples(st.integers(1, 12), st.booleans()), max_size=6),
)
def test_each_line_has_one_output_line_wherever_its_owners_die(
    count: int, failing: set[int], kills: list[tuple[int, bool]]
) -> None:
    failed = sorted(each for each in failing if each < count)

    async def act(place: Place) -> None:
        await place.create(lines(count, failed))
        for number, (steps, after) in enumerate(kills):
            with suppress(Killed):
                mortal = Mortal(place.storage, steps, after=after)
                async with place.owned(f"holder-{number}", mortal) as (runner, _):
                    try:
                        await runner.run()
                    except BaseExceptionGroup as error:
                        raise Killed from error
            if (await place.record()).ended:
                break
        if not (await place.record()).ended:
            await place.run("last")
        await check_whole(place, count, failed)
        used = {piece.name for each in await place.files().all_of(OWNER) for piece in each.pieces}
        place.now += 4000
        await place.files().sweep(1e9, -1e18)
        left = {piece.name for each in await place.files().all_of(OWNER) for piece in each.pieces}
        assert left <= used

    with TemporaryDirectory() as folder:
        storage = DirectoryStorage(Path(folder) / "store", "--batch-store")
        try:
            run(act, storage)
        finally:
            storage.close()


def test_two_frontends_that_both_believe_they_own_a_batch_write_each_line_once() -> None:
    async def act(place: Place) -> None:
        await place.create(lines(40, [3]))
        async with place.owned("one", turns=2) as (first, old):
            running = asyncio.create_task(first.run())
            await old.reached(12)
            # The first was silent for too long; it is not dead.
            async with place.owned("two", turns=3) as (second, new):
                await second.run()
            with pytest.raises(LeaseLostError):
                await running
        assert len(old.ran) + len(new.ran) >= 40
        await check_whole(place, 40, [3])

    run(act)


def test_a_batch_that_is_cancelled_keeps_what_was_done_and_says_what_was_not() -> None:
    async def act(place: Place) -> None:
        await place.create(lines(20))
        async with place.owned("one") as (runner, work):
            work.gate = asyncio.Event()
            running = asyncio.create_task(runner.run())
            await work.reached(3)
            before = work.prepared
            await place.cancel()
            runner.look()
            await running
        # Lines that are not run are read too, and as the others: not on the event loop.
        assert work.prepared - before == len(b"".join(lines(20).splitlines()))
        record = await place.record()
        output, error = await place.outputs()
        assert (record.status, output, len(error)) == ("cancelled", [], 20)
        assert {each["error"]["code"] for each in error} == {"batch_cancelled"}
        assert all(each["response"] is None for each in error)
        assert cancelled(record, place.now) == record

    run(act)


def test_lines_that_have_not_run_at_the_end_of_the_window_are_expired() -> None:
    async def act(place: Place) -> None:
        await place.create(lines(10), window=2)
        async with place.owned("one") as (runner, work):
            work.gate = asyncio.Event()
            running = asyncio.create_task(runner.run())
            await work.reached(3)
            place.now += 2
            await running
        record = await place.record()
        _, error = await place.outputs()
        assert record.status == "expired"
        assert [each["error"]["code"] for each in error] == ["batch_expired"] * 10

    run(act)


def test_a_batch_whose_key_was_removed_is_cancelled() -> None:
    async def act(place: Place) -> None:
        await place.create(lines(10))
        async with place.owned("one") as (runner, work):
            work.gate = asyncio.Event()
            running = asyncio.create_task(runner.run())
            await work.reached(3)
            work.allowed = False
            await running
        assert (await place.record()).status == "cancelled"

    run(act)


def test_a_batch_that_fills_its_owners_share_fails_and_keeps_what_was_done() -> None:
    async def act(place: Place) -> None:
        await place.create(lines(40))
        async with place.owned("one") as (runner, work):
            work.room = False
            await runner.run()
        record = await place.record()
        output, error = await place.outputs()
        assert record.status == "failed"
        assert [each.code for each in record.problems] == ["storage_full"]
        assert 4 <= len(output) < 40
        assert len(output) + len(error) == 40

    run(act)


def test_a_matrix_that_has_no_room_is_not_written_however_few_of_its_rows_there_are() -> None:
    class Embedding(Echo):
        async def answer(self, number: int, request: LineRequest) -> Outcome:
            return (await super().answer(number, request))._replace(vector=bytes(16))

    async def act(place: Place) -> None:
        await place.create(b"\n" * 5000 + lines(1), output_format="npy")
        async with place.owned("one", work=Embedding) as (runner, work):
            work.room = False
            await runner.run()
            assert 4999 * 16 < work.asked_room <= 5000 * 16  # beside the row that is kept
        record = await place.record()
        assert [each.code for each in record.problems] == ["storage_full"]
        assert (record.rows, record.width, record.matrix_file_id) == (5001, 4, None)
        assert len(await place.storage.contents()) < 10

    run(act)


def test_a_batch_in_which_all_lines_fail_has_no_output_file() -> None:
    async def act(place: Place) -> None:
        await place.create(lines(5, range(5)))
        await place.run()
        assert (await place.record()).output_file_id is None
        await check_whole(place, 5, range(5))

    run(act)


def test_storage_that_is_full_or_away_for_a_time_delays_a_batch_and_loses_nothing() -> None:
    class Away(Mortal):
        left = 6

        async def _step(self, act: Callable[[], Any]) -> Any:
            type(self).left -= 1
            if type(self).left in (1, 3):
                raise OverloadedError("no room left")
            found = await act()
            if type(self).left == 2:
                # It was done, and its answer was lost.
                raise OverloadedError("no answer")
            return found

    async def act(place: Place) -> None:
        await place.create(lines(12))
        await place.run(storage=Away(place.storage, None))
        await check_whole(place, 12)

    run(act)


def test_a_released_batch_goes_on_where_it_was() -> None:
    async def act(place: Place) -> None:
        await place.create(lines(30))
        async with place.owned("one", turns=50) as (runner, before):
            running = asyncio.create_task(runner.run())
            await before.reached(20)
            running.cancel()
            with suppress(asyncio.CancelledError):
                await running
            await runner.release()
        assert (await place.record()).lease.holder == ""
        done = (await place.record()).completed
        assert 0 < done < 30
        again = await place.run("two")
        assert len(again.ran) == 30 - done
        await check_whole(place, 30)

    run(act)


def test_stored_prompts_that_lines_name_are_held_while_the_batch_lives() -> None:
    refs = ["pe-" + letter * 32 for letter in "ab"]

    async def act(place: Place) -> None:
        await place.create(
            line("a", prompt_embeds={"ref": refs[1]}) + line("b", x={"ref": refs[0]}) + line("c")
        )
        async with place.owned("one") as (runner, work):
            work.gate = asyncio.Event()
            running = asyncio.create_task(runner.run())
            await work.reached(3)
            async with asyncio.timeout(30):
                while not work.held:  # noqa: ASYNC110
                    await asyncio.sleep(0.001)
            assert work.held == refs
            work.gate.set()
            await running

    run(act)


def test_no_stored_document_that_lines_name_expires_under_a_long_batch() -> None:
    async def act() -> None:
        loop, ttl = asyncio.get_running_loop(), 1.0
        store = PromptStore(SECRET, memory_bytes=1 << 20, ttl=ttl, clock=loop.time)
        named, other = (
            store.put(
                "alice", Buffer(bytes([n]) * 64), NewVectors(Buffer(bytes(64)), (4, 8), "float16")
            ).id
            for n in range(2)
        )
        place = Place(MemoryStorage(1 << 24))
        await place.create(line("a", documents=[{"ref": named}]))
        async with place.owned("one") as (runner, work):
            work.gate = asyncio.Event()
            running = asyncio.create_task(runner.run())
            while loop.time() < 5 * ttl:
                await asyncio.sleep(ttl / 4)
                for ref in work.held:
                    store.touch("alice", ref)
            work.gate.set()
            await running
        assert store.holds("alice", named)
        assert not store.holds("alice", other)
        store.close()

    virtual_time.run(act())


def problems(data: bytes) -> list[tuple[str, int | None, str | None]]:
    found: list[tuple[str, int | None, str | None]] = []

    async def act(place: Place) -> None:
        await place.create(data)
        work = await place.run()
        record = await place.record()
        assert (record.status, work.ran, record.input) == ("failed", [], ())
        found.extend((each.code, each.line, each.param) for each in record.problems)

    run(act)
    return found


def test_bad_input_is_told_with_its_lines_and_nothing_runs() -> None:
    good = line("good")
    assert problems(b"") == [("empty_file", None, None)]
    assert problems(b"\n \r\n") == [("empty_file", None, None)]
    assert problems(good + b'{"custom_id": \n') == [("invalid_json_line", 2, None)]
    assert problems(b"[1]\n" + good) == [("invalid_json_line", 1, None)]
    assert problems(line("?").replace(b"?", b"\xff")) == [("invalid_json_line", 1, None)]
    assert problems(good + b"[" * 3000 + b"\n") == [("invalid_json_line", 2, None)]
    assert problems(b'{"method": "POST"}\n') == [("missing_required_parameter", 1, "custom_id")]
    assert problems(good + b"\n" + good) == [("duplicate_custom_id", 3, "custom_id")]
    assert problems(line("a", url="/v1/completions")) == [("url_mismatch", 1, "url")]
    assert problems(good + line("b", model="n")) == [("model_mismatch", 2, "body.model")]
    assert problems(line("a", model="absent")) == [("invalid_model", None, "body.model")]
    assert problems(good + line("b", bad=1)) == [("invalid_request", 2, "body.bad")]
    assert problems(line("x" * 513)) == [("invalid_custom_id", 1, "custom_id")]
    assert problems(line("")) == [("invalid_custom_id", 1, "custom_id")]
    assert problems(line("a", input="x" * 5000) + good) == [("line_too_long", 1, None)]
    many = b"".join(line(f"id-{index}") for index in range(Echo.max_lines + 5))
    assert problems(many) == [("too_many_tasks", Echo.max_lines + 1, None)]
    # A matrix has a row for each line, also for a blank one.
    assert problems(b"\n" * Echo.max_lines + good) == [("too_many_tasks", Echo.max_lines + 1, None)]
    assert len(problems(b"{\n" * 1000)) == 100


def test_what_is_kept_is_sealed_with_the_key_and_read_with_it_alone() -> None:
    async def act(place: Place) -> None:
        place.key = b"k" * 32
        await place.create(lines(9))
        await place.run()
        await check_whole(place, 9)
        for name in await place.storage.contents():
            file = BytesIO()
            sizes = {
                piece.name: piece.size
                for each in await place.files().all_of(OWNER)
                for piece in each.pieces
            }
            assert await place.storage.read(name, sizes[name] + 48, file)
            assert b"id-1" not in file.getvalue()
        place.key = b"x" * 32
        with pytest.raises(Exception, match="was changed"):
            await place.outputs()

    run(act)


def test_a_record_of_a_million_lines_stays_small() -> None:
    record = BatchRecord(
        id=new_id("batch_"), endpoint="/v1/embeddings", input_file_id="file-a", window="24h",
        created_at=0, expires_at=1, done=tuple((2 * n, 2 * n + 1) for n in range(256)),
    )  # fmt: skip
    assert len(encode(record)) < 8192
    assert msgspec.msgpack.decode(encode(record), type=BatchRecord) == record
