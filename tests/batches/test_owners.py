"""Several frontends that each believe they own one batch: each line is written once."""

import asyncio
from contextlib import suppress
from io import BytesIO

from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.store.kept.joining import MOST_SMALL
from inlay.store.kept.lease import LeaseLostError
from inlay.store.kept.memory import MemoryStorage
from tests import virtual_time
from tests.batches.fakes import Slow
from tests.batches.test_runner import OWNER, Place, check_whole, lines
from tests.examples import examples

TICK = 0.005
ticks = st.integers(0, 40).map(lambda number: number * TICK)


@settings(max_examples=examples(120), deadline=None)
@given(
    count=st.integers(1, 60),
    failing=st.sets(st.integers(0, 59), max_size=4),
    owners=st.lists(st.tuples(ticks, st.lists(ticks, max_size=5)), min_size=2, max_size=5),
)
def test_each_line_has_one_output_line_whoever_believes_to_own_the_batch(
    count: int, failing: set[int], owners: list[tuple[float, list[float]]]
) -> None:
    failed = sorted(each for each in failing if each < count)

    async def own(place: Place, number: int, begin: float, seconds: list[float]) -> None:
        # It takes the batch though another that is not dead has it.
        await asyncio.sleep(begin)
        if (await place.record()).ended:
            return
        with suppress(LeaseLostError, AssertionError):  # another was first
            storage = Slow(place.storage, seconds)
            async with place.owned(f"holder-{number}", storage, turns=3) as (runner, _):
                await runner.run()

    async def act() -> None:
        place = Place(MemoryStorage(1 << 24))
        await place.create(lines(count, failed))
        async with asyncio.TaskGroup() as group:
            for number, (begin, seconds) in enumerate(owners):
                group.create_task(own(place, number, begin, seconds))
        if not (await place.record()).ended:
            await place.run("last")
        await check_whole(place, count, failed)

    virtual_time.run(act())


def test_an_output_that_grows_by_little_stays_few_pieces() -> None:
    async def act() -> None:
        place = Place(MemoryStorage(1 << 24))
        await place.create(lines(40 * MOST_SMALL, [3, 500]))
        most = 0

        async with place.owned("one") as (runner, _):
            running = asyncio.create_task(runner.run())
            while not running.done():
                most = max(most, len((await place.record()).output))
                await asyncio.sleep(0)
            await running
        assert 1 < most <= MOST_SMALL
        await check_whole(place, 40 * MOST_SMALL, [3, 500])
        # The small ones are gone.
        assert await place.storage.contents() == await named(place)

    virtual_time.run(act())


async def named(place: Place) -> set[str]:
    """Return the names of all contents of the files of the place."""
    return {piece.name for each in await place.files().all_of(OWNER) for piece in each.pieces}


def test_a_batch_ends_on_a_storage_that_never_has_room_to_join_its_output() -> None:
    async def act() -> None:
        place = Place(MemoryStorage(1 << 24))
        count = 4 * (MOST_SMALL + 2)
        await place.create(lines(count))
        async with place.owned("one") as (runner, _), asyncio.timeout(100):
            running = asyncio.create_task(runner.run())
            while len((await place.record()).output) < MOST_SMALL - 1:  # noqa: ASYNC110
                await asyncio.sleep(0)
            # What is left takes some more pieces, and never as many as are joined.
            left = (1 << 24) - (await place.storage.size())[0]
            await place.storage.write("other", BytesIO(bytes(left - 8000)))
            await running
        await check_whole(place, count)
        assert await place.storage.contents() == {"other"} | await named(place)

    virtual_time.run(act())
