"""Videos in processes of their own beside pictures, in one encoder."""

import asyncio
import threading

from transformers import AutoConfig

from inlay.engine.decoding import DECODING_THREADS
from inlay.engine.torch.media.encoder import MediaEncoder
from inlay.engine.torch.media.processing import ImageProcessor
from inlay.engine.torch.media.readers import Inputs, PictureReader, Plan
from inlay.errors import InvalidRequestError
from inlay.prompt import Media
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
        return Plan(1, 1, self.read, apart=True)

    def read(self) -> Inputs:
        self.reading += 1
        self.started.release()
        self.go.wait(60)
        raise InvalidRequestError("a video cannot be decoded")


async def test_videos_that_take_long_keep_no_picture_waiting() -> None:
    tower, waiting = Watched(), Waiting()
    pictures = ImageProcessor(vision(FAMILY), AutoConfig.from_pretrained(vision(FAMILY)))
    encoder = MediaEncoder(
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
