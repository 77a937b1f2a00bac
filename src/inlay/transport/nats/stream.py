"""A stream at its frontend."""

from collections.abc import AsyncIterator, Callable, Sequence

import msgspec

from inlay.errors import InlayError
from inlay.request import Output, Request
from inlay.transport.output_queue import OutputQueue

_ACKNOWLEDGED_AT = 32
"""Pieces used since the last acknowledgement from which on the next does not wait."""


class NatsStream:
    """`inlay.transport.api.Stream` over NATS.

    Attributes:
        number: of the stream.
        request: what it answers.
        received: pieces that have come, without a gap.
        cancelled: whether it is to be stopped.
        ended: the last piece has come, or it has failed.
    """

    def __init__(
        self, number: int, request: Request, *, used: Callable[[], None], cancel: Callable[[], None]
    ) -> None:
        """Nothing has come.

        Args:
            number: of the stream.
            request: what it answers.
            used: told when much has been used since it was last told.
            cancel: stops the stream.
        """
        self.number = number
        self.request = request
        self._tell_used = used
        self._tell_cancelled = cancel
        self._deltas = OutputQueue()
        self._used = 0
        self._told = 0
        self.received = 0
        self.cancelled = False
        self.ended = False

    @property
    def used(self) -> int:
        """Pieces that need not be kept for us: once cancelled, whatever came."""
        return self.received if self.cancelled or self.ended else self._used

    def feed(self, number: int, output: Output) -> bool:
        """Take a piece; whether it is the next or an old one, and no gap is before it."""
        if number != self.received:
            return number < self.received
        self.received += 1
        self._deltas.put(msgspec.structs.replace(output, request_id=self.request.id))
        self.ended = self.ended or output.finish_reason is not None
        return True

    def abort(self) -> None:
        """End as a request ends that was stopped before its worker had it."""
        request = self.request
        self.feed(
            self.received,
            Output(request.id, request.attempt, len(request.prior_output), finish_reason="abort"),
        )

    def fail(self, error: InlayError) -> None:
        """End with `error` after what has arrived."""
        if not self.ended:
            self.ended = True
            self._deltas.fail(error)

    async def __aiter__(self) -> AsyncIterator[Sequence[Output]]:
        async for batch in self._deltas:
            yield batch
            self._count_used(len(batch))

    def _count_used(self, count: int) -> None:
        self._used += count
        if self._used - self._told >= _ACKNOWLEDGED_AT:
            self._told = self._used
            self._tell_used()

    def cancel(self) -> None:
        """Stop the request; needs no answer."""
        if not self.cancelled:
            self.cancelled = True
            if not self.ended:
                self._tell_cancelled()
