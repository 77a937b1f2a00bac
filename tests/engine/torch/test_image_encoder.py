"""`TowerEncoder`: batches, one computation for equal images, the byte budget, cancelling."""

import asyncio
import queue
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache

import pytest
from torch import Tensor
from transformers import AutoConfig

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.engine.decoding import DECODING_THREADS, in_thread
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.media.encoder import TowerEncoder
from inlay.engine.torch.media.processing import ImageProcessor
from inlay.engine.torch.media.readers import Inputs, PictureReader, Plan
from inlay.engine.torch.media.tower import Arrays, Tower
from inlay.engine.torch.model import CausalModel
from inlay.messages.prompt import Media
from tests.engine.torch.vision_reference import Picture, prompt_of, spec
from tests.vision_models import vision

FAMILY = "internvl"


@cache
def model() -> CausalModel:
    return CausalModel.load(
        EngineSettings.of(model=str(vision(FAMILY)), device="cpu", num_threads=1)
    )


class Watched(Tower):
    """A tower that waits until it is let go, and tells how many images it saw together."""

    def __init__(self) -> None:
        super().__init__(model().tower, model().hidden_size)
        self.go = threading.Event()
        self.go.set()
        self.batches: list[int] = []
        self.broken = False

    def encode(
        self, inputs: Sequence[dict[str, Tensor]], counts: Sequence[int]
    ) -> list[Arrays | InlayError]:
        self.go.wait(30)
        self.batches.append(len(inputs))
        if self.broken:
            raise KeyError("pixel_values")
        return super().encode(inputs, counts)


def run_of(seed: int) -> Media:
    """The first run of a picture of its own."""
    (run,) = (
        segment
        for segment in prompt_of(FAMILY, [Picture(seed, 40, 56)]).segments
        if isinstance(segment, Media)
    )
    return run


@asynccontextmanager
async def started(
    memory: int = 1 << 30, places: int = 16
) -> AsyncIterator[tuple[TowerEncoder, Watched]]:
    tower = Watched()
    processor = ImageProcessor(vision(FAMILY), AutoConfig.from_pretrained(vision(FAMILY)))
    encoder = TowerEncoder(
        tower,
        {"image": PictureReader(processor, spec(FAMILY))},
        spec(FAMILY),
        cache_bytes=1 << 20,
        dtype="float32",
        hidden_size=tower.hidden_size,
        memory=memory,
        places=places,
    )
    try:
        yield encoder, tower
    finally:
        tower.go.set()
        await encoder.close()


async def settled(encoder: TowerEncoder) -> None:
    """Let everything happen that does not wait for the tower."""
    for _ in range(4):
        await in_thread(encoder._headers, int)
        # What waited for a place before is done when what comes last has all of them.
        meeting = threading.Barrier(DECODING_THREADS)
        jobs = [encoder._decoders.run(None, 1000, meeting.wait) for _ in range(DECODING_THREADS)]
        await asyncio.gather(*jobs)
        for _ in range(5):
            await asyncio.sleep(0)


async def test_images_that_wait_for_the_tower_are_encoded_together() -> None:
    async with started() as (encoder, tower):
        tower.go.clear()
        first = asyncio.create_task(encoder.rows(run_of(1)))
        await settled(encoder)
        others = [asyncio.create_task(encoder.rows(run_of(seed))) for seed in (2, 3, 4)]
        await settled(encoder)
        tower.go.set()
        found = await asyncio.gather(first, *others)
        assert tower.batches == [1, 3]
        assert len({bytes(rows.data.view) for rows in found}) == 4
        assert encoder.cache.misses == 4


async def test_equal_images_are_encoded_once_and_a_cancelled_leader_leaves_no_one_waiting() -> None:
    async with started() as (encoder, tower):
        tower.go.clear()
        leader = asyncio.create_task(encoder.rows(run_of(1)))
        await settled(encoder)
        follower = asyncio.create_task(encoder.rows(run_of(1)))
        await settled(encoder)
        leader.cancel()
        with suppress(asyncio.CancelledError):
            await leader
        tower.go.set()
        rows = await follower
        assert rows == await encoder.rows(run_of(1))
        assert encoder.cache.hits == 1
        assert tower.batches == [1]


async def test_pictures_beyond_the_budget_are_read_one_after_another() -> None:
    async with started(memory=1) as (encoder, tower):
        tower.go.clear()
        tasks = [asyncio.create_task(encoder.rows(run_of(seed))) for seed in (1, 2, 3)]
        await settled(encoder)
        # One that waits for memory goes, and the last gets its turn.
        tasks[1].cancel()
        await settled(encoder)
        tower.go.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert isinstance(found[1], asyncio.CancelledError)
        assert found[0] != found[2]
        assert tower.batches == [1, 1]
        assert encoder._room.free == 1


async def test_a_tower_that_fails_fails_its_images_and_no_later_ones() -> None:
    async with started() as (encoder, tower):
        tower.broken = True
        with pytest.raises(EngineError, match="an image could not be encoded: KeyError"):
            await encoder.rows(run_of(1))
        tower.broken = False
        assert len(await encoder.rows(run_of(1))) == 20


async def test_an_image_without_data_is_refused() -> None:
    async with started() as (encoder, _):
        run = run_of(1)
        with pytest.raises(InvalidRequestError, match="an image of the prompt has no data"):
            await encoder.rows(Media("image", run.digest, len(run)))


async def test_clients_take_turns_and_a_higher_priority_goes_first() -> None:
    async with started(places=1) as (encoder, tower):
        tower.go.clear()
        order: list[str] = []

        async def wait(name: str, seed: int, priority: int = 0) -> None:
            await encoder.rows(run_of(seed), client=name[0], priority=priority)
            order.append(name)

        async with asyncio.TaskGroup() as group:
            group.create_task(wait("a0", 1))
            await settled(encoder)
            for seed in (2, 3, 4):
                group.create_task(wait(f"a{seed - 1}", seed))
            group.create_task(wait("b0", 5))
            group.create_task(wait("c0", 6, priority=-1))
            await settled(encoder)
            tower.go.set()
        assert order == ["a0", "c0", "a1", "b0", "a2", "a3"]


class Slow:
    """Reads one picture after the other, each when the test says so."""

    def __init__(self, reader: PictureReader) -> None:
        self._reader = reader
        self.reading: queue.SimpleQueue[bytes] = queue.SimpleQueue()
        self.go = threading.Semaphore(0)

    def plan(self, run: Media) -> Plan:
        plan = self._reader.plan(run)

        def read() -> Inputs:
            self.reading.put(run.digest)
            self.go.acquire()
            return plan.read()

        return plan._replace(read=read)


async def test_a_picture_waits_for_those_that_are_decoded_and_for_no_others_of_a_client() -> None:
    tower = Watched()
    processor = ImageProcessor(vision(FAMILY), AutoConfig.from_pretrained(vision(FAMILY)))
    slow = Slow(PictureReader(processor, spec(FAMILY)))
    encoder = TowerEncoder(
        tower,
        {"image": slow},
        spec(FAMILY),
        cache_bytes=0,
        dtype="float32",
        hidden_size=tower.hidden_size,
    )
    many = [asyncio.create_task(encoder.encode(run_of(seed), "many", 0)) for seed in range(12)]
    try:
        for _ in range(DECODING_THREADS):
            await asyncio.to_thread(slow.reading.get)
        few = asyncio.create_task(encoder.encode(run_of(99), "few", 0))
        # One who leaves before the turn has nothing decoded.
        left = asyncio.create_task(encoder.encode(run_of(98), "left", 0))
        for _ in range(3):
            await in_thread(encoder._headers, int)
            await asyncio.sleep(0)
        left.cancel()
        # Its turn comes after one of the other's at most.
        slow.go.release(2)
        assert run_of(99).digest in [await asyncio.to_thread(slow.reading.get) for _ in range(2)]
    finally:
        slow.go.release(100)
        await asyncio.gather(*many, few, left, return_exceptions=True)
        await encoder.close()
    rest = {slow.reading.get() for _ in range(slow.reading.qsize())}
    assert run_of(98).digest not in rest
