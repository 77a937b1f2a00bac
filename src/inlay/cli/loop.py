"""A command that runs until it is told to stop."""

import asyncio
from collections.abc import Coroutine
from typing import Any

import uvloop

from inlay.cli.signals import EXIT_INTERRUPTED, on_signals


def run_until_signal(main: Coroutine[Any, Any, None]) -> int:
    """Run `main` in an event loop of its own, cancelled by the first SIGINT or SIGTERM unless it handles them otherwise.

    Returns:
        0, or `EXIT_INTERRUPTED` where it ended by being cancelled.
    """
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(_interruptible(main))
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    return 0


async def _interruptible(main: Coroutine[Any, Any, None]) -> None:
    task = asyncio.current_task()
    if task is not None:
        on_signals(task.cancel)
    await main


__all__ = ["run_until_signal"]
