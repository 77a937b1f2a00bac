"""Prompts cut into the parts that engines with towers of their own take: texts, rows and images.

Names of parts are inlay's digests of their content with the request's salt, of a file as it came
and of rows by value, and never what a client chose: caches of these engines know an item by its
name alone.
"""

from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, NamedTuple, TypeAlias, cast

import numpy as np
import torch
from blake3 import blake3

from inlay.base.errors import InvalidRequestError
from inlay.engine.decoding import (
    DECODING_THREADS,
    MEMORY_BYTES,
    PLACES,
    Decoders,
    Room,
    SizedImage,
    image_key,
    in_thread,
    sized_image,
)
from inlay.engine.pictures import decode
from inlay.media.geometry import PatchGrid
from inlay.media.positions import GRID_FIELD, grid_field
from inlay.media.spec import MediaSpec
from inlay.messages.digest import Secret, row_digests, with_digests
from inlay.messages.prompt import Media, Prompt, Rows, Tokens
from inlay.messages.request import Request

TRIED = (64, 48), (300, 700), (1200, 800)
"""Heights and widths of pictures whose layout is tried at the start."""

_ROWS_OF_AN_ITEM = 256
"""Positions at whose multiples rows are cut into items; equal items are found in the cache."""

ImageRun: TypeAlias = tuple[Media, *tuple[Tokens | Media, ...]]
"""Segments of one image: the runs of its rows, and the tokens between."""


class Pictures:
    """Decodes files of images in threads of its own, within bytes that clients share."""

    def __init__(self) -> None:
        self._room = Room(PLACES, MEMORY_BYTES)
        self.threads = ThreadPoolExecutor(DECODING_THREADS, "inlay-images")
        self._decoders = Decoders("inlay-media")

    def close(self) -> None:
        """Stop the threads."""
        self.threads.shutdown(wait=False, cancel_futures=True)
        self._decoders.close()

    async def prompt_of(self, request: Request, secret: Secret) -> Prompt:
        """Return the prompt and the earlier output of a request, its rows with their digests."""
        prompt = request.prompt + Prompt.of(Tokens(request.prior_output))
        return await in_thread(self.threads, with_digests, prompt, secret)

    @asynccontextmanager
    async def decoded(
        self, run: Media, spec: MediaSpec, request: Request
    ) -> AsyncIterator[tuple[Any, SizedImage]]:
        """Hold the picture of the image that `run` is of, and what its header says.

        Raises:
            InvalidRequestError: a file that is no picture, or of another size than it was laid out
                for.
        """
        if run.data is None:
            raise InvalidRequestError(f"an {run.kind} of the prompt has no data")
        data, sized = await in_thread(self.threads, sized_image, run, spec)
        async with self._room.taken(sized.bytes, request.client, request.priority):
            decoding = self._decoders.run(
                request.client, request.priority, decode, data, sized.header
            )
            yield await decoding, sized


class NamedRows(NamedTuple):
    """Rows of a prompt as one item.

    Attributes:
        values: a copy of them and their inner features, (rows, width * (1 + levels)); none are 0.
        grid: in patches, of an image's rows that have one.
        digests: of the rows.
        name: of the item, 16 bytes.
    """

    values: torch.Tensor
    grid: tuple[int, int, int] | None
    digests: bytes
    name: bytes


def named_rows(
    rows: Rows, position: int, spec: MediaSpec, secret: Secret, salt: str | None
) -> Iterator[NamedRows]:
    """Rows from `position` on as items: those of an image as one, others cut at fixed positions.

    Raises:
        InvalidRequestError: rows that do not fill their grid.
    """
    grid = _grid(rows, spec)
    for part in [rows] if grid is not None else _cut(rows, position):
        digests = row_digests(part, secret)
        kind = f"{'image' if grid else 'prompt_embeds'}:{len(part)}:{grid}:".encode()
        name = image_key(blake3(kind + digests).digest(16), salt)
        yield NamedRows(_values(part, spec), grid, digests, name)


def image_name(run: Media, salt: str | None) -> bytes:
    return image_key(run.digest + run.total.to_bytes(8), salt)


def parts_of(prompt: Prompt) -> Iterator[Tokens | Rows | ImageRun]:
    """The segments of a prompt, those of one image together.

    Raises:
        InvalidRequestError: it has a part of an image without the rest.
    """
    image: list[Tokens | Media] = []
    wanted: tuple[bytes, int] | None = None
    for segment in prompt.segments:
        if isinstance(segment, Media):
            here = (segment.digest, segment.start)
            if here != (wanted or (segment.digest, 0)):
                break
            image.append(segment)
            end = segment.start + len(segment)
            wanted = None if end == segment.total else (segment.digest, end)
            if wanted is None:
                yield cast("ImageRun", tuple(image))
                image = []
        elif wanted is None:
            yield segment
        elif isinstance(segment, Tokens):
            image.append(segment)
        else:
            break
    else:
        if wanted is None:
            return
    raise InvalidRequestError("a prompt has a part of an image without the rest of it")


def _values(rows: Rows, spec: MediaSpec) -> torch.Tensor:
    width = rows.shape[1]
    dtype = getattr(torch, rows.dtype)
    found = torch.zeros(len(rows), width * (1 + spec.deepstack), dtype=dtype)
    levels = {f"deepstack.{level}": 1 + level for level in range(spec.deepstack)}
    for at, data in (
        (0, rows.data),
        *((levels[f.name], f.data) for f in rows.bundle if f.name in levels),
    ):
        values = torch.frombuffer(data.view, dtype=dtype).view(rows.shape)
        found[:, at * width : (at + 1) * width] = values
    return found


def _grid(rows: Rows, spec: MediaSpec) -> tuple[int, int, int] | None:
    """The grid in patches of an image's rows, or None of rows without one."""
    given = next((each for each in rows.bundle if each.name == GRID_FIELD), None)
    geometry = spec.image
    if given is None or not isinstance(geometry, PatchGrid):
        return None
    index = np.frombuffer(given.data.view, "<i4").reshape(-1, 3)
    lines, columns = int(index[:, 1].max()) + 1, int(index[:, 2].max()) + 1
    if len(rows) != lines * columns or grid_field(lines, columns).data != given.data:
        raise InvalidRequestError(
            f"the {len(rows)} rows of an image do not fill a grid of {lines} x {columns}"
        )
    return 1, lines * geometry.merge, columns * geometry.merge


def _cut(rows: Rows, position: int) -> Iterator[Rows]:
    """Rows from `position` on, cut at fixed positions of the prompt."""
    start = 0
    while start < len(rows):
        stop = min(len(rows), start + _ROWS_OF_AN_ITEM - (position + start) % _ROWS_OF_AN_ITEM)
        yield rows.slice(start, stop)
        start = stop
