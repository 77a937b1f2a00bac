"""A thread that computes for the event loop."""

import asyncio
import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue
from typing import TypeVar

log = logging.getLogger(__name__)

T = TypeVar("T")


class ComputeThread:
    """One thread that runs calls of the event loop, one at a time."""

    def __init__(self) -> None:
        self._work: SimpleQueue[Callable[[], None] | None] = SimpleQueue()
        self._thread: threading.Thread | None = None

    async def run(self, work: Callable[[], T]) -> T:
        """Call `work` in the thread; return its result or raise its error."""
        loop = asyncio.get_running_loop()
        done: asyncio.Future[T] = loop.create_future()

        def settle(result: T | None, error: BaseException | None) -> None:
            if done.cancelled():
                return
            if error is not None:
                done.set_exception(error)
            else:
                done.set_result(result)  # type: ignore[arg-type]

        def compute() -> None:
            result: T | None = None
            failure: Exception | None = None
            try:
                result = work()
            except Exception as error:  # raised again where it is awaited
                failure = error
            try:
                loop.call_soon_threadsafe(settle, result, failure)
            except RuntimeError:
                log.warning("the event loop closed while the engine was computing")

        if self._thread is None:
            self._thread = threading.Thread(target=self._loop, name="inlay-engine", daemon=True)
            self._thread.start()
        self._work.put(compute)
        return await done

    def _loop(self) -> None:
        while (work := self._work.get()) is not None:
            work()

    def close(self) -> None:
        """End the thread. Nothing may be running in it."""
        if self._thread is not None:
            self._work.put(None)
            self._thread.join()
