"""What the signals of a terminal or a supervisor of processes do."""

import asyncio
import signal
from collections.abc import Callable
from typing import Final

EXIT_INTERRUPTED: Final = 130
"""What a shell says of a command that SIGINT ended."""


def on_signals(act: Callable[[], object]) -> None:
    """Have SIGINT and SIGTERM call `act` on the running event loop.

    SIGINT too: a shell starts background jobs with it ignored, and then asyncio leaves it so.
    """
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, act)
