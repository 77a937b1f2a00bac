"""Requests of an engine and who receives their outputs, and answers to futures of the loop."""

import asyncio
import logging
from collections.abc import Callable, Iterable
from functools import partial
from typing import NamedTuple, TypeVar

from msgspec.structs import replace

from inlay.base.errors import EngineError, InlayError
from inlay.engine.shell import fault_of
from inlay.engine.torch.needs import Need
from inlay.engine.torch.step import Core
from inlay.messages.request import Emit, EngineUsage, FinishReason, Output, Request

log = logging.getLogger(__name__)


class Receiver(NamedTuple):
    """Receiver of a request's outputs, and its last output if the thread never saw it.

    `expires` is the request's deadline on the clock of `Core.expire`.
    """

    request: Request
    emit: Emit
    expires: float | None

    def lost(self, error: InlayError) -> Output:
        """Return the last output, with `error`."""
        return self._last("error", error)

    def aborted(self) -> Output:
        """Return the last output of an aborted request."""
        return self._last("abort", None)

    def _last(self, reason: FinishReason, error: InlayError | None) -> Output:
        usage = EngineUsage(len(self.request.prompt), len(self.request.prior_output))
        return replace(self.request.end(reason, error), usage=usage)


class Receivers:
    """The requests that have not ended, and where their outputs go. On the event loop."""

    def __init__(self, ended: Callable[[str], None], abort: Callable[[str], None]) -> None:
        self._by_id: dict[str, Receiver] = {}
        self._ended = ended
        self._abort = abort

    def __len__(self) -> int:
        return len(self._by_id)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._by_id

    def __getitem__(self, request_id: str) -> Receiver:
        return self._by_id[request_id]

    def add(self, request: Request, emit: Emit, expires: float | None) -> Receiver:
        """Return the receiver of a new request."""
        receiver = self._by_id[request.id] = Receiver(request, emit, expires)
        return receiver

    def deliver(self, outputs: Iterable[Output]) -> None:
        """Emit outputs; a last one ends its request."""
        for output in outputs:
            ended = output.finish_reason is not None
            receiver = self._by_id[output.request_id]
            if ended:
                del self._by_id[output.request_id]
                self._ended(output.request_id)
            if fault_of(receiver.emit, output) is None:
                continue
            # Its client misses this output for good, so the request ends.
            if ended:
                lost = receiver.lost(EngineError("the end of the answer was not sent"))
                fault_of(receiver.emit, lost)
            else:
                self._abort(output.request_id)

    def aborted_prefetches(self) -> list[Output]:
        """Return the last outputs of the prefetches, which the thread never saw."""
        return [one.aborted() for one in self._by_id.values() if one.request.prefetch]

    def fail_all(self, error: InlayError) -> None:
        """End every request with `error`."""
        self.deliver([receiver.lost(error) for receiver in tuple(self._by_id.values())])


def admit(receiver: Receiver, needs: Iterable[Need], core: Core) -> Iterable[Output]:
    """Admit one request; an error ends only this one."""
    try:
        return core.admit(receiver.request, receiver.expires, needs=needs)
    except InlayError as error:
        return [receiver.lost(error)]
    except Exception as error:
        log.exception("request %s was not admitted", receiver.request.id)
        return [receiver.lost(EngineError(f"the request was not admitted: {type(error).__name__}"))]


_T = TypeVar("_T")


def resolve(future: "asyncio.Future[_T]", value: _T) -> None:
    """Set the result, unless the future is done."""
    if not future.done():
        future.set_result(value)


def reject(future: "asyncio.Future[_T]", error: InlayError) -> None:
    """Set the error, unless the future is done."""
    if not future.done():
        future.set_exception(error)


def reply_to(
    question: Callable[[Core], _T],
    future: "asyncio.Future[_T]",
    call: Callable[[Callable[[], object]], None],
) -> Callable[[Core], Iterable[Output]]:
    """Return a command that answers `question` to `future`, through `call` to its event loop."""

    def answer(core: Core) -> Iterable[Output]:
        try:
            found = question(core)
        except InlayError as error:
            call(partial(reject, future, error))
        else:
            call(partial(resolve, future, found))
        return ()

    return answer
