"""`MediaEncoder`: batches, one computation for equal images, the byte budget, cancelling."""

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import cache

import pytest
from torch import Tensor
from transformers import AutoConfig

from inlay.engine.decoding import DECODING_THREADS, in_thread
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.media.encoder import MediaEncoder
from inlay.engine.torch.media.processing import ImageProcessor
from inlay.engine.torch.media.readers import PictureReader
from inlay.engine.torch.media.tower import Arrays, Tower
from inlay.engine.torch.model import CausalModel
from inlay.errors import EngineError, InlayError, InvalidRequestError
from inlay.prompt import Media
from tests.engine.torch.vision_reference import Picture, prompt_of, spec
from tests.vision_models import vision

FAMILY = "internvl"


@cache
def model() -> CausalModel:
    return CausalModel.load(EngineSettings(model=str(vision(FAMILY)), device="cpu", num_threads=1))


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
) -> AsyncIterator[tuple[MediaEncoder, Watched]]:
    tower = Watched()
    processor = ImageProcessor(vision(FAMILY), AutoConfig.from_pretrained(vision(FAMILY)))
    encoder = MediaEncoder(
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


async def settled(encoder: MediaEncoder) -> None:
    """Let everything happen that does not wait for the tower."""
    # A picture goes through the decoding threads twice: all that they were given before is done
    # when all of them meet.
    for _ in range(4):
        meeting = threading.Barrier(DECODING_THREADS)
        jobs = [in_thread(encoder._threads, meeting.wait) for _ in range(DECODING_THREADS)]
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
