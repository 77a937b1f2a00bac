"""A transfer at its sender."""

import asyncio
from collections.abc import Sequence

from inlay.errors import InlayError
from inlay.transport.nats.notices import Credit, Named, places


class Outbound:
    """A transfer to another participant.

    Attributes:
        named: its parts that the receiver may have.
        heard: when the receiver gave its last sign of life, or None while it has not been offered.
        granted: chunks that may be sent.
        more: set when there may be something to do.
        done: resolved when all of it has arrived; `OverloadedError` when it will not.
    """

    def __init__(
        self,
        to: str,
        number: int,
        parts: Sequence[memoryview],
        chunk: int,
        named: tuple[Named, ...],
    ) -> None:
        self.to = to
        self.number = number
        self.chunk_bytes = chunk
        self.named = named
        self.heard: float | None = None
        self.granted = 0
        self.sizes = tuple(part.nbytes for part in parts)
        self.header = bytes(parts[0])
        self._parts = parts
        self._places = places(self.sizes, chunk)
        self.more = asyncio.Event()
        self.done: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self.done.add_done_callback(self._ended)

    def _ended(self, done: "asyncio.Future[None]") -> None:
        self.more.set()
        if not done.cancelled():
            # Nobody may be waiting for it any more.
            done.exception()

    @property
    def names(self) -> set[str]:
        """Of its named parts."""
        return {named.name for named in self.named}

    @property
    def arrived(self) -> bool:
        """Whether all of it has."""
        return self.done.done() and not self.done.cancelled() and self.done.exception() is None

    def grant(self, credit: Credit) -> None:
        """Take a credit."""
        if not credit.chunks:
            return
        if not self.granted and credit.present:
            self._places = places(self.sizes, self.chunk_bytes, credit.present)
        if credit.chunks > self.granted:
            self.granted = min(credit.chunks, len(self._places))
            self.more.set()

    def chunk(self, index: int) -> memoryview:
        """The bytes of a chunk."""
        part, start, stop = self._places[index]
        return self._parts[part][start:stop]

    def fail(self, error: InlayError) -> None:
        """End without having arrived."""
        if not self.done.done():
            self.done.set_exception(error)
