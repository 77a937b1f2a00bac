"""Rounds that a frontend makes over what it keeps."""

import asyncio
import logging
from collections.abc import Awaitable, Callable
from typing import NoReturn

from inlay.base.errors import OverloadedError

_log = logging.getLogger(__name__)


async def rounds(
    act: Callable[[], Awaitable[None]], seconds: float, wake: asyncio.Event | None = None
) -> NoReturn:
    """Act now, and `seconds` after each end; a round that fails is logged.

    Args:
        act: one round.
        seconds: between two rounds.
        wake: of this alone; begins the next round at once.
    """
    wake = wake or asyncio.Event()
    while True:
        wake.clear()
        try:
            await act()
        except OverloadedError as error:
            _log.warning("what is kept waits: %s", error.message)
        except Exception:
            _log.exception("a round over what is kept failed; the next is in %g s", seconds)
        try:
            async with asyncio.timeout(seconds):
                await wake.wait()
        except TimeoutError:
            continue
