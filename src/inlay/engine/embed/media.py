"""Rows in place of the images and audio of a request's prompts."""

import asyncio
from collections.abc import Mapping

from msgspec.structs import replace

from inlay.engine.embed.vector_model import MediaRows
from inlay.errors import EngineError, InvalidRequestError
from inlay.media.positions import placed
from inlay.prompt import Media, Prompt, Rows, Segment
from inlay.request import Request


def has_media(request: Request) -> bool:
    """Return True if a prompt of `request` has media."""
    return any(
        isinstance(segment, Media) for prompt in request.prompts for segment in prompt.segments
    )


async def with_rows(request: Request, media: MediaRows) -> Request:
    """Return `request` with rows in place of the media of its prompts.

    Rows keep the positions of their item as a field of their bundle. An item is encoded once.

    Raises:
        InlayError: an item is not valid, or cannot be encoded.
    """
    runs: dict[bytes, Media] = {}
    for prompt in request.prompts:
        for segment in prompt.segments:
            if isinstance(segment, Media):
                known = runs.get(segment.digest)
                if known is None or known.data is None:
                    runs[segment.digest] = segment
    try:
        async with asyncio.TaskGroup() as group:
            tasks = {
                digest: group.create_task(_rows_of(request, run, media))
                for digest, run in runs.items()
            }
    except ExceptionGroup as failed:
        raise failed.exceptions[0] from None
    rows = {digest: task.result() for digest, task in tasks.items()}
    return replace(request, prompts=tuple(_encoded(prompt, rows) for prompt in request.prompts))


async def _rows_of(request: Request, run: Media, media: MediaRows) -> Rows:
    try:
        found = await media.rows(
            run, salt=request.salt, client=request.client, priority=request.priority
        )
    except InvalidRequestError as error:
        raise run.located(error) from error
    if len(found) != run.total:
        raise EngineError(
            f"the encoder made {len(found)} rows of an {run.kind} laid out as {run.total}"
        )
    return found


def _encoded(prompt: Prompt, rows: Mapping[bytes, Rows]) -> Prompt:
    segments: list[Segment] = []
    for segment in prompt.segments:
        if isinstance(segment, Media):
            part = rows[segment.digest].slice(segment.start, segment.start + len(segment))
            segments.append(placed(part, segment))
        else:
            segments.append(segment)
    return Prompt.of(*segments)
