"""A plane of several workers of this machine, of whose caches a router is told."""

from collections.abc import Callable
from functools import partial

from inlay.base.errors import OverloadedError
from inlay.messages.routing import FrontendLoad, KvEvents, KvSnapshot
from inlay.transport.link import GONE, PeerLink
from inlay.transport.local.plane import LocalPlane


class RoutedPlane(LocalPlane):
    """`LocalPlane`, and `inlay.messages.routing.RoutingFeed`.

    There is no other frontend to tell of its load.
    """

    def __init__(self) -> None:
        super().__init__()
        self._events: Callable[[str, KvEvents], None] | None = None
        self._watched: set[PeerLink] = set()

    def listen(
        self, events: Callable[[str, KvEvents], None], loads: Callable[[FrontendLoad], None]
    ) -> None:
        """As `RoutingFeed.listen`; nothing is ever told of loads."""
        self._events = events
        self._watch()

    def publish(self, load: FrontendLoad) -> None:
        """As `RoutingFeed.publish`, to nobody."""

    async def kv_snapshot(self, worker_id: str) -> KvSnapshot:
        link = next((link for link in self._links if link.id == worker_id), None)
        if link is None:
            raise OverloadedError(GONE, retry_after=1)
        return await link.kv_snapshot()

    def _tell(self) -> None:
        self._watch()
        super()._tell()

    def _watch(self) -> None:
        """Have every worker that tells of its cache tell the router."""
        self._watched.intersection_update(self._links)
        if self._events is None:
            return
        for link in self._links:
            if link.ready and link.card.kv_events and link not in self._watched:
                self._watched.add(link)
                link.watch_cache(partial(self._events, link.id))
