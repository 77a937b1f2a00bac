"""A worker tries its engine on a timer, so that asking how it is costs nothing."""

import asyncio
import logging
import time
from collections.abc import Callable
from typing import NoReturn

from inlay.errors import InlayError
from inlay.protocol.health import Probe
from inlay.protocol.work import Engine
from inlay.worker.sleeping import Sleeping

log = logging.getLogger(__name__)

_SLACK = 10.0
"""Seconds a probe may come late where the machine is busy before it tells of a worker that is stuck."""


class Probing:
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
        self, engine: Engine, sleeping: Sleeping, *, interval: float, timeout: float, tell: Callable[[], None]
    ) -> None:
        self._engine = engine
        self._sleeping = sleeping
        self._interval = interval
        self._timeout = timeout
        self._tell = tell
        self.last: Probe | None = None

    async def run(self) -> NoReturn:
        """Probe until cancelled."""
        while True:
            if not self._interval:
                await asyncio.Event().wait()
            # An engine does not fall asleep with a probe under way, nor is it probed while it sleeps.
            async with self._sleeping.turn:
                self.last = None if self._sleeping.level else await self._probe()
            self._tell()
            await asyncio.sleep(self._interval)

    async def _probe(self) -> Probe:
        began = time.monotonic()
        error: str | None = None
        try:
            await asyncio.wait_for(self._engine.probe(), self._timeout)
        except TimeoutError:
            error = f"the engine did not answer within {self._timeout:g} s"
        except InlayError as failed:
            error = failed.message
        if error is not None:
            log.error("probe: %s", error)
        return Probe(
            at=time.time(),
            seconds=time.monotonic() - began,
            error=error,
            next_within=self._interval + self._timeout + _SLACK,
        )
