"""A worker tries its engine on a timer, so that asking how it is costs nothing."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from inlay.base import liveness
from inlay.base.errors import EngineError, InlayError
from inlay.engine.api import Engine
from inlay.messages.card import Probe
from inlay.worker.sleeping import SleepControl

log = logging.getLogger(__name__)

_SLACK = 10.0
"""Seconds a probe may come late on a busy machine before it tells of a stuck worker."""


class EngineProber:
    """Probes of one engine.

    Args:
        engine: started.
        sleeping: of the engine; one that sleeps is not probed.
        interval: seconds between two; 0 for none.
        timeout: seconds after which an engine that has not answered is stuck.
        tell: called after each.

    Attributes:
        last: None before the first, and since the engine fell asleep.
    """

    def __init__(
        self,
        engine: Engine,
        sleeping: SleepControl,
        *,
        interval: float,
        timeout: float,
        tell: Callable[[], None],
    ) -> None:
        self._engine = engine
        self._sleeping = sleeping
        self._interval = interval
        self._timeout = timeout
        self._tell = tell
        self.last: Probe | None = None

    async def first(self) -> None:
        """Probe an engine that nobody has been told of yet, unless it is never probed or sleeps.

        Raises:
            EngineError: it failed, or took too long.
        """
        if not self._interval or self._sleeping.level:
            return
        self.last = await self._probe()
        if self.last.error is not None:
            raise EngineError(f"the model failed at its first token: {self.last.error}")

    async def run(self) -> NoReturn:
        """Probe until cancelled; the first one was perhaps made."""
        if self.last is not None:
            await asyncio.sleep(self._interval)
        while True:
            if not self._interval:
                await asyncio.Event().wait()
            # An engine does not fall asleep with a probe under way, nor is it probed while it
            # sleeps.
            async with self._sleeping.turn:
                self.last = None if self._sleeping.level else await self._probe()
            if self.last is not None and self.last.error is not None:
                log.error("probe: %s", self.last.error)
            self._tell()
            await asyncio.sleep(self._interval)

    async def _probe(self) -> Probe:
        began = time.monotonic()
        error: str | None = None
        try:
            async with liveness.timeout(self._timeout):
                await self._engine.probe()
        except TimeoutError:
            error = f"the engine did not answer within {self._timeout:g} s (--health-probe-timeout)"
        except InlayError as failed:
            error = failed.message
        except Exception as failed:  # a probe that fails must not end the worker, but be told of
            log.exception("a probe failed")
            error = f"the engine failed at a probe: {type(failed).__name__}"
        return Probe(
            at=time.time(),
            seconds=time.monotonic() - began,
            error=error,
            next_within=self._interval + self._timeout + _SLACK,
        )
