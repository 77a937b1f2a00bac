"""Places for work that is done at the same time: no client can take them all."""

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Hashable
from contextlib import asynccontextmanager, suppress
from typing import Any

from inlay.base.fair_queue import FairQueue

_Turn = asyncio.Future[None]


class Slot:
    """A place that a client has.

    Attributes:
        pending: what occupies it, even after its holder has left.
    """

    __slots__ = ("pending",)

    def __init__(self) -> None:
        self.pending: list[asyncio.Future[Any]] = []

    def occupy(self, work: "asyncio.Future[Any]") -> None:
        """Count the place as taken until `work` is done, such as a thread that cannot be ended."""
        self.pending.append(work)
        work.add_done_callback(_seen)


def _seen(work: "asyncio.Future[Any]") -> None:
    """Take note of the error of work whose holder has left."""
    if not work.cancelled():
        work.exception()


class Slots:
    """A number of places, given to clients in turn.

    A client may have as many places as remain free, and one in any case: so one alone has half of
    them, two have a third each, and whoever comes next finds one at once.

    Args:
        places: at the same time, of all clients.
    """

    def __init__(self, places: int) -> None:
        self.free = places
        self._open: Counter[Hashable] = Counter()
        self._waiting: FairQueue[tuple[Hashable, _Turn]] = FairQueue()

    @asynccontextmanager
    async def taken(self, client: Hashable) -> AsyncIterator[Slot]:
        """Have a place within this context, once it is the client's turn."""
        turn: _Turn = asyncio.get_running_loop().create_future()
        self._waiting.push((client, turn), client, 0)
        self._give()
        place = Slot()
        try:
            await turn
            yield place
        finally:
            if turn.done() and not turn.cancelled():
                self._leave(client, place)
            else:
                with suppress(KeyError, ValueError):  # it was passed over already
                    self._waiting.remove((client, turn), client, 0)

    def _leave(self, client: Hashable, place: Slot) -> None:
        left = [work for work in place.pending if not work.done()]
        if left:
            place.pending = left
            left[0].add_done_callback(lambda _: self._leave(client, place))
            return
        self.free += 1
        self._open[client] -= 1
        if not self._open[client]:
            del self._open[client]
        self._give()

    def _give(self) -> None:
        while self.free and len(self._waiting):
            full = {client for client, count in self._open.items() if count >= self.free}
            try:
                client, turn = self._waiting.take(full)
            except IndexError:
                return
            if turn.cancelled():
                continue
            self.free -= 1
            self._open[client] += 1
            turn.set_result(None)
