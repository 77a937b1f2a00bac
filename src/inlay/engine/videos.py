"""Frames of MP4 and WebM, decoded in a process that can do nothing else."""

from collections.abc import Iterator

from PIL import Image

from inlay.base.errors import InvalidRequestError
from inlay.engine.decoding import decoder_bytes
from inlay.media.decoder import Decoder, can_decode
from inlay.media.frames import CANNOT_DECODE, VideoHeader

CPU_SECONDS = 60
"""Processor time of one video."""


def decode_container(data: memoryview, header: VideoHeader) -> Iterator[Image.Image]:
    """Decode the sampled frames of an MP4 or WebM, as they lie in the file, one after the other.

    Raises:
        InvalidRequestError: the file is damaged or not what its header says, takes too long or too
            much memory, or its decoder broke down.
    """
    said = header.container
    if said is None or not can_decode():
        raise InvalidRequestError(CANNOT_DECODE)
    task = {
        "kind": "video",
        "format": {"MP4": "mov", "WEBM": "matroska"}[said.format],
        "codec": said.codec,
        "size": (said.width, said.height),
        "frames": said.frames,
        "indices": sorted(set(header.indices)),
        "memory": decoder_bytes(header),
        "seconds": CPU_SECONDS,
    }
    with Decoder("a video", data, task) as decoder:
        frame: Image.Image | None = None
        last = -1
        for index in header.indices:
            if frame is None or index != last:
                frame, last = _frame(decoder, said.width, said.height), index
            yield frame


def _frame(decoder: Decoder, width: int, height: int) -> Image.Image:
    kind = decoder.read(1)
    if kind == b"F":
        pixels = decoder.read(width * height * 3)
        if len(pixels) == width * height * 3:
            return Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)
    raise decoder.failure(kind)
