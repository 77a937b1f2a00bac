"""Payloads that the request of a stage makes, as the stages behind it may have them."""

import asyncio
import logging
from collections.abc import Callable, Sequence

import msgspec

from inlay.base.errors import LOST, InlayError, OverloadedError
from inlay.messages.edges import PayloadLease
from inlay.messages.request import Output, Payload
from inlay.router.resume import ResumingStream

log = logging.getLogger(__name__)


class StageResult:
    """The payloads of a request, or the lease of them while its worker keeps them.

    Args:
        payloads: of a request that has ended, or None.
        again: has the worker begin anew with the request, or None where nobody can.
        continues: a further attempt gives what earlier ones have not, as of hidden states; else it
            gives everything anew.
        newest: of payloads that nobody keeps the newest alone counts.
        hold: reserves bytes for payloads that nobody keeps, which gather here; raises an
            `InlayError` where there is no room for them.

    Attributes:
        lease: of the last attempt.
        complete: nothing follows.
        error: why nothing follows, or None.
    """

    def __init__(
        self,
        payloads: Sequence[Payload] | None = None,
        again: Callable[[], None] | None = None,
        *,
        continues: bool = False,
        newest: bool = False,
        hold: Callable[[int], None] = lambda _: None,
    ) -> None:
        self._again = again
        self._continues = continues
        self._newest = newest
        self._hold = hold
        self._reserved = self._num_bytes = 0
        self._payloads: list[Payload] = list(payloads or ())
        self._attempt = 0
        self._stale = -1
        self._changed = asyncio.Event()
        self._stop: Callable[[], None] = lambda: None
        self._stop_holding: Callable[[PayloadLease | None], None] = lambda _: None
        self._detached = False
        self.lease: PayloadLease | None = None
        self.complete = payloads is not None
        self.error: Exception | None = None

    def take(self, output: Output) -> None:
        """Note what an output says of the payloads. Raises as `hold`; then nothing follows."""
        if output.attempt == self._stale:
            return  # it is on its way to its end, and what it has made since is lost too
        further = output.attempt != self._attempt
        if further:
            self._attempt, self.lease = output.attempt, None
        if (further and not self._continues) or (self._newest and output.payloads):
            self._payloads, self._num_bytes = [], 0
        if self._detached and output.lease is not None:
            self._stop_holding(output.lease)
        if not self._detached:
            self._reserve(output)
            self._payloads += output.payloads
        self.lease = output.lease or self.lease
        self.complete = output.held is not None or output.finish_reason in ("stop", "length")
        self._changed.set()

    def _reserve(self, output: Output) -> None:
        self._num_bytes += sum(len(payload.data) for payload in output.payloads)
        more = self._num_bytes - self._reserved
        if more <= 0:
            return
        try:
            self._hold(more)
        except InlayError as error:
            self.fail(error)
            raise
        self._reserved += more

    def made_by(self, stream: ResumingStream) -> None:
        """Have `stream` begin anew where what its worker keeps is lost, and end where all ends."""
        self._again, self._stop, self._stop_holding = (
            stream.restart,
            stream.cancel,
            stream.stop_holding,
        )
        if self.error is not None:
            stream.cancel()

    def on_output(self, output: Output) -> Output:
        """Take an output of a language model; return it without what it says of payloads.

        Raises the error of `give_up`, and as `take`.
        """
        if self.error is not None:
            raise self.error
        self.take(output)
        if output.held is None:
            return msgspec.structs.replace(output, payloads=(), lease=None)
        if not self.complete:
            # Nobody reads the stream after the end of its text.
            self.fail(OverloadedError("what a stage has made is lost", retry_after=1))
        return msgspec.structs.replace(output, payloads=(), held=None, finish_reason=output.held)

    def fail(self, error: Exception) -> None:
        """Nothing follows, because of an error."""
        self.error = error
        self._changed.set()

    def give_up(self, error: Exception) -> None:
        """End the request: its reader has failed, for which it would wait for ever."""
        self.fail(error)
        self._stop()

    def detach(self) -> None:
        """Have a request that is under way go on without keeping anything: its reader has ended.

        The reader's worker would pass over the rest, but not once it is lost itself.
        """
        self._detached = True
        if not self.complete:
            self._stop_holding(self.lease)

    def renew(self, lost: PayloadLease) -> None:
        """Have what was kept under a lease made again, if it is the last.

        Raises:
            OverloadedError: nobody can.
        """
        if self.lease == lost:
            if self.complete or self._again is None:
                raise OverloadedError("what a stage has made is lost", retry_after=1, reason=LOST)
            self.lease, self._stale = None, self._attempt
            self._again()

    async def inputs(self, *, streamed: bool) -> PayloadLease | Sequence[Payload]:
        """Return the lease, or the payloads themselves where nobody keeps them.

        Args:
            streamed: once there is a lease; else once all is made.

        Raises:
            Exception: the request has failed, by an `InlayError` unless it was given up.
        """
        while True:
            self._changed.clear()
            if self.error is not None:
                raise self.error
            if self.lease is not None and (streamed or self.complete):
                return self.lease
            if self.complete and self.lease is None:
                return self._payloads
            await self._changed.wait()


class RunningStage:
    """A request of a stage, read until all is made, and kept open until it is released."""

    def __init__(
        self, stream: ResumingStream, making: StageResult, count: Callable[[Output], None]
    ) -> None:
        self.making = making
        self._count = count
        self._stream = stream
        self._reading = asyncio.create_task(self._read())

    async def _read(self) -> None:
        try:
            async for batch in self._stream:
                for output in batch:
                    check(output)
                    self.making.take(output)
                    self._count(output)
                if self.making.complete:
                    return
        except InlayError as error:
            self.making.fail(error)
        except Exception as error:
            # Who waits for the payloads must not wait for ever.
            log.exception("reading a stage's outputs failed")
            self.making.fail(error)

    async def ended(self) -> None:
        """Wait until all is made, or nothing follows because of an error."""
        await asyncio.wait([self._reading])

    def cancel(self) -> None:
        """End the request, and with it its leases."""
        self._stream.cancel()
        self._reading.cancel()

    async def release(self) -> None:
        """End it, and wait until nothing of it runs."""
        self.cancel()
        await asyncio.gather(self._reading, return_exceptions=True)


def check(output: Output) -> None:
    """Raise the error that an output carries."""
    if output.error is not None:
        raise output.error.to_error()
    if output.finish_reason == "abort":
        raise OverloadedError("the worker aborted the request", retry_after=1)
