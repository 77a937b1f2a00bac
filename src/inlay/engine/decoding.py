"""Decoding of media beside the event loop: threads, and places and bytes that clients share."""

import asyncio
import os
import threading
from collections.abc import AsyncIterator, Callable, Hashable
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, suppress
from typing import Any, NamedTuple, TypeVar

from blake3 import blake3

from inlay.base.errors import InvalidRequestError
from inlay.base.fair_queue import FairQueue
from inlay.base.pace import while_wanted
from inlay.base.single_flight import shielded
from inlay.media.audio import AudioHeader, read_audio_header
from inlay.media.frames import VideoHeader
from inlay.media.geometry import Layout
from inlay.media.image import ImageHeader, read_image_header
from inlay.media.spec import (
    NAMED,
    Detail,
    MediaSpec,
    audio_layout,
    layout,
    video_header,
    video_layout,
)
from inlay.messages.prompt import Media

_T = TypeVar("_T")

DECODING_THREADS = max(2, min(8, (os.cpu_count() or 2) // 4))
"""Files decoded and resized at the same time."""

MEMORY_BYTES = 1 << 30
"""Bytes of pictures and tower inputs at the same time; a larger picture is read alone."""

PLACES = 16
"""Images in hand at the same time, decoded or waiting to be encoded. Others wait by client."""

_RESIZING_BYTES = 8
"""Bytes of a pixel of the picture while it is resized, measured with 40 million pixels."""

_VIDEO_BYTES = 20
"""Bytes of a pixel of the frame in hand, of any format."""

_INPUT_BYTES = 60
"""Bytes of a pixel that the tower sees, while patches are made of it; 57 measured for Qwen2-VL."""

_FRAME_BYTES = 15
"""Bytes of a pixel of a video that the tower sees, of all frames beside the one in hand."""

_DECODER_BYTES = 64 << 20
_DECODER_PIXEL_BYTES = 64
"""Memory of a process that decodes MP4 or WebM: of any, and for each pixel of a frame. Up to 17
frames of 3 bytes a pixel are kept; 32 were measured for H.264 with 16 reference frames."""

_SOUND_BYTES = 40
"""Bytes of a sample that the encoder hears, while its spectrum is made."""


class SizedImage(NamedTuple):
    """An image whose header was read.

    Attributes:
        header: of its file.
        layout: of its rows, as the prompt has them.
        settings: arguments of an image processor that make it so.
    """

    header: ImageHeader
    layout: Layout
    settings: dict[str, Any]

    @property
    def bytes(self) -> int:
        """Memory that it takes while it is decoded and made into inputs of a tower."""
        pixels = self.layout.size[0] * self.layout.size[1]
        resizing = _RESIZING_BYTES * self.layout.resizing
        return self.header.decoding_bytes + resizing + _INPUT_BYTES * pixels


def sized_image(run: Media, spec: MediaSpec) -> tuple[memoryview, SizedImage]:
    """Return the file of the image that `run` is of, and what its header says.

    Raises:
        InvalidRequestError: the file is no picture, is too large, or is not of the size that the
            prompt was laid out for.
    """
    data = _data_of(run)
    header = read_image_header(data, max_pixels=spec.max_pixels)
    detail: Detail | None = "low" if run.detail == "low" else None
    laid = layout(spec, header.height, header.width, detail)
    if laid.rows != run.total:
        raise InvalidRequestError(
            f"an image of {header.width} x {header.height} pixels has {laid.rows} rows; the "
            f"prompt has room for {run.total}"
        )
    return data, SizedImage(header, laid, spec.processor_settings(detail))


class SizedVideo(NamedTuple):
    """A video whose header was read; attributes as of `SizedImage`."""

    header: VideoHeader
    layout: Layout

    @property
    def pixels(self) -> int:
        """Pixels of all frames that the tower sees."""
        return len(self.header.indices) * self.layout.size[0] * self.layout.size[1]

    @property
    def bytes(self) -> int:
        """Memory that it takes while it is decoded and made into inputs of a tower."""
        one = self.layout.size[0] * self.layout.size[1]
        frame = _VIDEO_BYTES * self.header.height * self.header.width + _INPUT_BYTES * one
        process = 0 if self.header.container is None else decoder_bytes(self.header)
        return process + frame + _FRAME_BYTES * self.pixels


def decoder_bytes(header: VideoHeader) -> int:
    """Return the memory that a process which decodes an MP4 or WebM may take."""
    return _DECODER_BYTES + _DECODER_PIXEL_BYTES * header.height * header.width


def sized_video(run: Media, spec: MediaSpec) -> tuple[memoryview, SizedVideo]:
    """Return the file of a video, and what its header says. Errors as of `sized_image`."""
    data = _data_of(run)
    header = video_header(spec, data)
    laid, _ = video_layout(spec, header, lambda _: ())
    if laid.rows != run.total:
        raise InvalidRequestError(
            f"a video of {len(header.indices)} frames of {header.width} x {header.height} pixels "
            f"has {laid.rows} rows; the prompt has room for {run.total}"
        )
    return data, SizedVideo(header, laid)


class SizedSound(NamedTuple):
    """An audio file whose header was read.

    Attributes:
        header: of the file.
        rate: samples a second that the encoder takes.
    """

    header: AudioHeader
    rate: int

    @property
    def bytes(self) -> int:
        """Memory that it takes while it is decoded and made into inputs of a tower."""
        return 8 * self.header.samples + _SOUND_BYTES * self.header.samples_at(self.rate)


def sized_sound(run: Media, spec: MediaSpec) -> tuple[memoryview, SizedSound]:
    """Return the file of an audio item, and what its header says. Errors as of `sized_image`."""
    data = _data_of(run)
    header = read_audio_header(data)
    laid = audio_layout(spec, header)
    if laid.rows != run.total or spec.audio is None:
        raise InvalidRequestError(
            f"audio of {header.seconds:.3f} s has {laid.rows} rows; the prompt has room for "
            f"{run.total}"
        )
    return data, SizedSound(header, spec.audio.rate)


def _data_of(run: Media) -> memoryview:
    if run.data is None:
        raise InvalidRequestError(f"{NAMED[run.kind]} of the prompt has no data")
    return run.data.view


def image_key(digest: bytes, salt: str | None) -> bytes:
    """Name of an image's rows in a cache, 16 bytes: only requests with the same salt share them."""
    return blake3(digest + (b"" if salt is None else b"\x00" + salt.encode())).digest(16)


async def finished(running: "asyncio.Future[_T]") -> _T:
    """Return the result of `running`; a cancelled caller waits until it has ended."""
    try:
        return await shielded(running)
    except asyncio.CancelledError:
        await asyncio.wait([running])
        raise


async def in_thread(
    pool: ThreadPoolExecutor, function: Callable[..., _T], *arguments: object
) -> _T:
    """Run `function` in a thread of `pool`.

    When its caller is cancelled it ends at its next `check_wanted`; the caller waits until then.
    """
    left = threading.Event()
    run = asyncio.get_running_loop().run_in_executor
    running = run(pool, while_wanted, left, function, *arguments)
    try:
        return await shielded(running)
    except asyncio.CancelledError:
        left.set()
        await asyncio.wait([running])
        raise


class Decoders:
    """Threads that decode pictures, each within a second or two; clients take turns.

    What nobody waits for is not begun.
    """

    def __init__(self, name: str) -> None:
        """Start `DECODING_THREADS` threads called `name`."""
        self._threads = ThreadPoolExecutor(DECODING_THREADS, name)
        self._places = Room(DECODING_THREADS, 0)

    async def run(
        self, client: Hashable, priority: int, function: Callable[..., _T], *arguments: object
    ) -> _T:
        """Run `function` when it is the client's turn; further as `in_thread`."""
        async with self._places.taken(0, client, priority):
            return await in_thread(self._threads, function, *arguments)

    def close(self) -> None:
        """Stop the threads when what they do has ended."""
        self._threads.shutdown(cancel_futures=True)


class Room:
    """Places and bytes for images in hand, given to clients in turn.

    An image of more than all bytes is given all of them.
    """

    def __init__(self, places: int, memory: int) -> None:
        self.memory = memory
        self.free = memory
        self._places = places
        self._waiting: FairQueue[tuple[int, asyncio.Future[None]]] = FairQueue()

    @asynccontextmanager
    async def taken(self, count: int, client: Hashable, priority: int) -> AsyncIterator[None]:
        """Hold a place and `count` bytes within this context, once they are free."""
        count = min(count, self.memory)
        turn: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._waiting.push((count, turn), client, priority)
        self._give(0, 0)
        try:
            await turn
            yield
        finally:
            if not turn.cancelled():
                self._give(1, count)
            else:
                with suppress(KeyError, ValueError):  # it was passed over already
                    self._waiting.remove((count, turn), client, priority)
                self._give(0, 0)

    def _give(self, places: int, count: int) -> None:
        """Take a place and `count` bytes back, and give to those whose turn it is."""
        self._places += places
        self.free += count
        while len(self._waiting):
            wanted, turn = self._waiting.first()
            if not turn.done() and (not self._places or wanted > self.free):
                return
            self._waiting.take()
            if not turn.done():
                self._places -= 1
                self.free -= wanted
                turn.set_result(None)
