"""Processes that end with the process that started them."""

import ctypes
import os
import signal
import sys

_SET_PDEATHSIG = 1
"""Of Linux's prctl."""


def end_with_parent(number: signal.Signals, parent: int | None = None) -> None:
    """Have the system send `number` to this process when its parent dies, however that happens.

    On Linux. A process that is stopped is reached by SIGKILL too. The parent counts as dead once
    the thread has ended that started this process.

    Args:
        number: the signal.
        parent: id of the process that started this one; where it has died before, the signal is
            sent at once.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_SET_PDEATHSIG, number)
        if parent is not None and os.getppid() != parent:
            os.kill(os.getpid(), number)
