"""Questions to the other end that carry a number, and their answers."""

import asyncio
import logging
from collections.abc import Callable, Iterator
from typing import Generic, TypeVar

from inlay.base import liveness
from inlay.base.errors import EngineError, ErrorFrame, InlayError, InvalidRequestError
from inlay.messages.routing import CacheEventSource, KvSnapshot
from inlay.transport.messages import Cache

T = TypeVar("T")

log = logging.getLogger(__name__)

NO_CACHE = "the worker does not report what it caches"


class PendingCalls(Generic[T]):
    """Those of one kind that have not been answered."""

    def __init__(self, numbers: Iterator[int]) -> None:
        self._numbers = numbers
        self._waiting: dict[int, asyncio.Future[T]] = {}

    async def call(self, send: Callable[[int], None], within: float) -> T:
        """The answer to what `send` sends, given the question's number.

        Raises:
            TimeoutError: it has not come `within` seconds, as `inlay.base.liveness` counts them.
            InlayError: that was the answer, or there will be none.
        """
        number = next(self._numbers)
        answer: asyncio.Future[T] = asyncio.get_running_loop().create_future()
        self._waiting[number] = answer
        try:
            send(number)
            async with liveness.timeout(within):
                return await answer
        finally:
            del self._waiting[number]

    def resolve(self, number: int, answer: "T | InlayError") -> None:
        """Take an answer, or why there is none; one that nobody waits for any more is ignored."""
        waiting = self._waiting.get(number)
        if waiting is None or waiting.done():
            return
        if isinstance(answer, InlayError):
            waiting.set_exception(answer)
        else:
            waiting.set_result(answer)

    def fail(self, error: InlayError) -> None:
        """Answer all with `error`."""
        for number in list(self._waiting):
            self.resolve(number, error)


def snapshot_of(cache: Cache) -> "KvSnapshot | InlayError":
    """Return the state of a worker's cache, or the error."""
    if cache.snapshot is not None:
        return cache.snapshot
    return InvalidRequestError(NO_CACHE) if cache.error is None else cache.error.to_error()


async def answer_cache(number: int, handler: object) -> Cache:
    """A worker's answer when it is asked for all it has cached."""
    if not isinstance(handler, CacheEventSource):
        return Cache(number)
    try:
        return Cache(number, await handler.kv_snapshot())
    except InlayError as error:
        return Cache(number, error=ErrorFrame.of(error))
    except Exception as error:
        log.exception("the cache could not be told")
        failed = EngineError(f"the worker failed to tell its cache: {type(error).__name__}")
        return Cache(number, error=ErrorFrame.of(failed))
