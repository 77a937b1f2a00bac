"""Putting a worker's engine to sleep, and waking it."""

import asyncio
import logging
from collections.abc import Callable, Sequence
from typing import Literal, TypeAlias

from inlay.base import liveness
from inlay.base.errors import EngineError, InvalidRequestError, OverloadedError
from inlay.engine.api import Engine, SleepingEngine
from inlay.messages.request import Emit, Output

log = logging.getLogger(__name__)

Mode: TypeAlias = Literal["abort", "wait"]
"""Treatment of the running requests, as vLLM names it.

They are aborted at once, or when they have not ended in time.
"""

MODES: tuple[Mode, ...] = ("abort", "wait")
LEVELS = (1, 2)
TAGS = ("weights", "kv_cache")
ABORT_SECONDS = 60.0
"""Seconds that an engine may take to end aborted requests; a step may be long."""


class RunningRequests:
    """The requests an engine has not ended yet."""

    def __init__(self) -> None:
        self.ids: set[str] = set()
        self._idle = asyncio.Event()
        self._idle.set()

    def track_outputs(self, request_id: str, emit: Emit) -> Emit:
        """Count a request; `emit` for it, which notices its end.

        What is not admitted after all ends with an output too.
        """
        self.ids.add(request_id)
        self._idle.clear()

        def noticing(output: Output) -> None:
            if output.finish_reason is not None:
                self.ids.discard(request_id)
                if not self.ids:
                    self._idle.set()
            emit(output)

        return noticing

    async def none(self, within: float) -> bool:
        """Wait for their end; False if some run after `within` seconds."""
        try:
            async with liveness.timeout(within):
                await self._idle.wait()
        except TimeoutError:
            return False
        return True


class SleepControl:
    """One engine's sleep. Commands are followed one after another.

    Args:
        engine: started, and awake.
        requests: those it has under way.
        enabled: whether it may sleep at all.
        tell: called whenever `level` has changed.

    Attributes:
        level: of its sleep, from when it takes no more requests until it is wholly awake; 0
            otherwise.
        turn: held while the engine falls asleep or wakes.
    """

    def __init__(
        self, engine: Engine, requests: RunningRequests, *, enabled: bool, tell: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._requests = requests
        self._enabled = enabled
        self._tell = tell
        self.turn = asyncio.Lock()
        self.level = 0

    def check_awake(self) -> None:
        """Raise `OverloadedError` unless requests are taken."""
        if self.level:
            raise OverloadedError("the worker is asleep", retry_after=1)

    async def sleep(self, level: int, mode: str, wait: float) -> int:
        """Take no more requests, see those under way end, and let the engine sleep.

        The level it sleeps at.

        Args:
            level: 1 or 2; one that sleeps falls deeper but not less deep.
            mode: one of `MODES`.
            wait: seconds after which requests are aborted that were waited for.

        Raises:
            InvalidRequestError: a level, mode or wait that is not allowed, or an engine that may
                not or cannot sleep, or not at this level.
            EngineError: requests did not end; the engine is awake.
        """
        engine = self._sleeper()
        if level not in LEVELS:
            raise InvalidRequestError(f"level must be 1 or 2, got {level}", param="level")
        if not wait >= 0:
            raise InvalidRequestError(f"wait must be 0 seconds or more, got {wait:g}", param="wait")
        if mode not in MODES:
            raise InvalidRequestError(f"mode must be abort or wait, got {mode!r}", param="mode")
        engine.check_sleep(level)
        async with self.turn:
            before = self.level
            if level <= before:
                return before
            self._set(level)
            try:
                await self._see_end(mode, wait)
                await engine.sleep(level)
            except BaseException:
                self._set(before)
                raise
        log.info("asleep, level %d", level)
        return level

    async def _see_end(self, mode: str, wait: float) -> None:
        if mode == "wait" and await self._requests.none(wait):
            return
        for request_id in tuple(self._requests.ids):
            self._engine.abort(request_id)
        if not await self._requests.none(ABORT_SECONDS):
            raise EngineError(
                f"{len(self._requests.ids)} requests did not end within {ABORT_SECONDS:g} s of "
                "being "
                "aborted"
            )

    async def wake_up(self, tags: Sequence[str]) -> bool:
        """Wake what `tags` name, all if none.

        Whether the engine is wholly awake, and takes requests.

        Raises:
            InvalidRequestError: a tag that is not known, or an engine that may not or cannot sleep.
            InlayError: what the engine says; it sleeps on.
        """
        engine = self._sleeper()
        unknown = [tag for tag in tags if tag not in TAGS]
        if unknown:
            raise InvalidRequestError(
                f"tags must be weights or kv_cache, got {unknown[0]!r}", param="tags"
            )
        async with self.turn:
            if self.level and await engine.wake_up(tags):
                self._set(0)
                log.info("awake")
            return not self.level

    def _sleeper(self) -> SleepingEngine:
        if not self._enabled:
            raise InvalidRequestError("You must set --enable-sleep-mode to put a worker to sleep")
        if not isinstance(self._engine, SleepingEngine):
            raise InvalidRequestError(f"the {self._engine.card.engine} engine cannot sleep")
        return self._engine

    def _set(self, level: int) -> None:
        if level != self.level:
            self.level = level
            self._tell()
