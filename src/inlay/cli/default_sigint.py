"""Ctrl-C before there is anything to end."""

import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def default_sigint() -> Iterator[None]:
    """Within it Ctrl-C ends the process as it ends one that knows nothing of signals, instead of raising `KeyboardInterrupt`."""
    handler = signal.getsignal(signal.SIGINT)
    if (
        handler is not signal.default_int_handler
        or threading.current_thread() is not threading.main_thread()
    ):
        yield
        return
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, handler)
