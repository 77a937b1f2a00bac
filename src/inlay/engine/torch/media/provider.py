"""`MediaProvider`: rows of the media that requests wait for."""

import asyncio
import logging
from collections.abc import Awaitable, Callable

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.engine.api import PeerWorkers
from inlay.engine.torch.media.encoder import TowerEncoder
from inlay.engine.torch.media.remote import RemoteEncoders
from inlay.engine.torch.media.tower import Arrays
from inlay.engine.torch.needs import Need, Result
from inlay.messages.prompt import Media
from inlay.messages.request import Request

log = logging.getLogger(__name__)


class MediaProvider:
    """`Provider` of rows: other encoders' first, if a request names some, else made here.

    Attributes:
        encoder: encodes them; it goes on where others wait for an item whose request has ended.
        peers: reaches other encoders, or None.
    """

    def __init__(self, encoder: TowerEncoder, peers: PeerWorkers | None) -> None:
        self.encoder = encoder
        self.peers = peers

    def start(
        self, request: Request, need: Need, done: Callable[[Result], object]
    ) -> Callable[[], object]:
        assert need.item is not None
        return asyncio.create_task(self._encode(request, need.item, done)).cancel

    async def _encode(self, request: Request, run: Media, done: Callable[[Result], object]) -> None:
        rows: Result
        try:
            rows = await self.encoder.rows(
                run,
                salt=request.salt,
                client=request.client,
                priority=request.priority,
                elsewhere=self._elsewhere(request, run),
            )
        except InvalidRequestError as error:
            rows = run.located(error)
        except InlayError as error:
            rows = error
        except Exception as error:
            log.exception("an image of request %s was not encoded", request.id)
            rows = EngineError(f"an image was not encoded: {type(error).__name__}")
        done(rows)

    def _elsewhere(self, request: Request, run: Media) -> Callable[[], Awaitable[Arrays]] | None:
        """Return what asks the request's sources for the rows of an image, if it has any."""
        if self.peers is None or not request.peers_of(run.digest):
            return None
        encoder = self.encoder
        apart = RemoteEncoders(
            self.peers, encoder.spec, encoder.dtype, encoder.hidden_size, last=not encoder.is_local
        )
        return lambda: apart.arrays(request, run)
