"""Videos in processes of their own beside pictures, in one encoder."""

import asyncio
import threading
from typing import Any

import pytest
from transformers import AutoConfig

from inlay.base.errors import InvalidRequestError
from inlay.base.pace import check_wanted
from inlay.engine.decoding import DECODING_THREADS
from inlay.engine.torch.media.encoder import TowerEncoder
from inlay.engine.torch.media.processing import ImageProcessor
from inlay.engine.torch.media.readers import Inputs, PictureReader, Plan
from inlay.messages.prompt import Media
from tests.engine.torch.test_image_encoder import FAMILY, Watched, run_of
from tests.engine.torch.vision_reference import spec
from tests.vision_models import vision


class Waiting:
    """Videos that are decoded until the test says so."""

    def __init__(self) -> None:
        self.go = threading.Event()
        self.reading = 0
        self.started = threading.Semaphore(0)

    def plan(self, run: Media) -> Plan:
        return Plan(1, 1, self.read, long=True)

    def read(self) -> Inputs:
        self.reading += 1
        self.started.release()
        self.go.wait(60)
        raise InvalidRequestError("a video cannot be decoded")


async def test_videos_that_take_long_keep_no_picture_waiting() -> None:
    tower, waiting = Watched(), Waiting()
    pictures = ImageProcessor(vision(FAMILY), AutoConfig.from_pretrained(vision(FAMILY)))
    encoder = TowerEncoder(
        tower,
        {"image": PictureReader(pictures, spec(FAMILY)), "video": waiting},
        spec(FAMILY),
        cache_bytes=1 << 20,
        dtype="float32",
        hidden_size=tower.hidden_size,
    )
    many = 20
    videos = [
        asyncio.create_task(
            encoder.encode(Media("video", bytes([index] * 16), 1), f"client {index}", 0)
        )
        for index in range(many)
    ]
    try:
        for _ in range(DECODING_THREADS):
            await asyncio.to_thread(waiting.started.acquire)
        assert len(await encoder.rows(run_of(1))) > 0
        assert waiting.reading == DECODING_THREADS
    finally:
        waiting.go.set()
        ended = await asyncio.gather(*videos, return_exceptions=True)
        await encoder.close()
    assert [type(each) for each in ended] == [InvalidRequestError] * many


async def test_a_video_whose_client_has_left_is_decoded_no_further() -> None:
    """Frames come from a generator that asks `check_wanted`, as those of all decoders do."""
    tower, begun, ended = Watched(), threading.Event(), threading.Event()

    class Endless:
        def plan(self, run: Media) -> Plan:
            return Plan(1, 1, self.read, long=True)

        def read(self) -> Inputs:
            try:
                while True:
                    check_wanted()
                    begun.set()
            finally:
                ended.set()

    encoder = TowerEncoder(
        tower,
        {"video": Endless()},
        spec(FAMILY),
        cache_bytes=0,
        dtype="float32",
        hidden_size=tower.hidden_size,
    )
    watching = asyncio.create_task(encoder.rows(Media("video", bytes(16), 1)))
    await asyncio.to_thread(begun.wait)
    watching.cancel()
    with pytest.raises(asyncio.CancelledError):
        await watching
    assert ended.is_set()
    await encoder.close()


async def test_a_client_with_many_videos_leaves_a_place_to_the_next_client() -> None:
    tower, waiting = Watched(), Waiting()
    encoder = TowerEncoder(
        tower,
        {"video": waiting},
        spec(FAMILY),
        cache_bytes=0,
        dtype="float32",
        hidden_size=tower.hidden_size,
    )

    def ask(client: str, count: int) -> "list[asyncio.Task[Any]]":
        runs = [Media("video", client.encode().ljust(15) + bytes([at]), 1) for at in range(count)]
        return [asyncio.create_task(encoder.encode(run, client, 0)) for run in runs]

    greedy = ask("greedy", 3 * DECODING_THREADS)
    try:
        for _ in range(DECODING_THREADS // 2):
            await asyncio.to_thread(waiting.started.acquire)
        modest = ask("modest", 1)
        await asyncio.to_thread(waiting.started.acquire)
        assert waiting.reading == DECODING_THREADS // 2 + 1
    finally:
        waiting.go.set()
        await asyncio.gather(*greedy, *modest, return_exceptions=True)
        await encoder.close()
