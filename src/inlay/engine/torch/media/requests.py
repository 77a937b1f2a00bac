"""Requests that wait for the rows of their images."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from inlay.engine.api import Peers
from inlay.engine.torch.media.apart import EncodersApart
from inlay.engine.torch.media.encoder import MediaEncoder
from inlay.engine.torch.media.tower import Arrays
from inlay.errors import EngineError, InlayError, InvalidRequestError
from inlay.prompt import Media, Rows
from inlay.request import Request

log = logging.getLogger(__name__)


class MediaRequests:
    """The images that the requests of one event loop asked for.

    Args:
        encoder: encodes them.
        ended: called once for each image, with the request's id, the image's digest and its rows,
            or the error that the request ends with; not after the request was stopped.
    """

    def __init__(
        self, encoder: MediaEncoder, ended: Callable[[str, bytes, Rows | InlayError], None]
    ) -> None:
        self.encoder = encoder
        self._ended = ended
        self._tasks: dict[str, set[asyncio.Task[None]]] = {}

    def start(self, request: Request, run: Media, peers: Peers | None = None) -> None:
        """Get the rows of the image of `run` for a request.

        The request's sources are asked through `peers` first; without any, they are made here.
        """
        task = asyncio.create_task(self._encode(request, run, peers))
        self._tasks.setdefault(request.id, set()).add(task)

    def stop(self, request_id: str) -> None:
        """Stop encoding for a request that has ended; images that others wait for go on."""
        for task in self._tasks.pop(request_id, ()):
            task.cancel()

    async def close(self) -> None:
        """Stop everything, and the encoder."""
        for request_id in tuple(self._tasks):
            self.stop(request_id)
        await self.encoder.close()

    async def _encode(self, request: Request, run: Media, peers: Peers | None) -> None:
        found: Rows | InlayError
        try:
            found = await self.encoder.rows(
                run,
                salt=request.salt,
                client=request.client,
                priority=request.priority,
                elsewhere=self._elsewhere(request, run, peers),
            )
        except InvalidRequestError as error:
            found = run.located(error)
        except InlayError as error:
            found = error
        except Exception as error:
            log.exception("an image of request %s was not encoded", request.id)
            found = EngineError(f"an image was not encoded: {type(error).__name__}")
        self._ended(request.id, run.digest, found)

    def _elsewhere(
        self, request: Request, run: Media, peers: Peers | None
    ) -> Callable[[], Awaitable[Arrays]] | None:
        """Return what asks the request's sources for the rows of an image, if it has any."""
        if peers is None or not request.peers_of(run.digest):
            return None
        encoder = self.encoder
        apart = EncodersApart(
            peers, encoder.spec, encoder.dtype, encoder.hidden_size, last=not encoder.is_here
        )
        return lambda: apart.arrays(request, run)
