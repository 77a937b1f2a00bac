"""Fairness within a process: no request waits long because of another.

Three things block all requests for tens of milliseconds if nothing is done. A full garbage
collection walks all objects of all modules. A thread that computes keeps the interpreter's lock for
a switch interval at a time. And the system lets it keep its core for a tick of its clock or
several, 4 ms each, while the event loop that was woken waits for that core.
"""

import gc
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias, TypeVar

T = TypeVar("T")

Lend: TypeAlias = Callable[[int], AbstractContextManager[None]]
"""Reserves so many bytes for a block, once there are as many."""

SWITCH = 0.0002
"""Seconds after which a thread gives up the interpreter's lock where another wants it.

Python's own are 25 times as many.
"""

TURN = 0.001
"""Seconds a thread in the background computes before it gives way.

With half of them, on two busy cores, a quarter fewer large requests came through.
"""

_PAUSE = 50e-6
"""Seconds it then leaves its core and the interpreter to others.

The system makes about 100 us of them.
"""

_PATIENCE = 3 * TURN
"""Seconds it waits for its next turn at most: who has it may be in a library, without the lock."""

_turns = threading.BoundedSemaphore(max(1, (os.cpu_count() or 1) // 2))
"""Held by the threads in the background whose turn it is.

Each that computes makes the event loop wait for the interpreter once more, at every call of the
system: on two cores 16 bodies that arrived together were read in 80 ms beside three of them.
"""


class Unwanted(Exception):
    """Nobody waits for the result of this computation any more."""


class _Own(threading.local):
    due = math.inf
    has_turn = False
    left: threading.Event | None = None
    lend: Lend | None = None


_own = _Own()


@contextmanager
def importing() -> Iterator[None]:
    """Import large libraries within: no garbage collection looks at what they make meanwhile.

    Looking through the objects of an engine's libraries, again and again while they are imported,
    took a quarter of the time of importing them.
    """
    enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if enabled:
            gc.enable()


def freeze_gc() -> None:
    """Have garbage collections leave out what is there now.

    Called once a process has all it needs to serve.

    What has been loaded is garbage never. Looking at the 66,000 objects of a frontend again took 30
    ms at a time.
    """
    gc.collect()
    gc.freeze()


def set_switch_interval() -> None:
    """Set the interpreter's switch interval of this process to `SWITCH`."""
    sys.setswitchinterval(SWITCH)


def mark_background() -> None:
    """Make the calling thread one in the background, which gives way."""
    _own.due = 0.0


def while_wanted(
    left: threading.Event, function: Callable[..., T], *arguments: Any, **named: Any
) -> T:
    """Call `function`, which ends at its next `check_wanted` once `left` is set.

    Raises:
        Unwanted: it has ended so.
    """
    _own.left = left
    try:
        check_wanted()
        return function(*arguments, **named)
    finally:
        _own.left = None
        _end_turn()


def lending(lend: Lend, function: Callable[..., T], *arguments: Any, **named: Any) -> T:
    """Call `function`, whose `reserved` blocks take their memory from `lend`."""
    _own.lend = lend
    try:
        return function(*arguments, **named)
    finally:
        _own.lend = None


def reserved(num_bytes: int) -> AbstractContextManager[None]:
    """Reserve memory for a block, once there is as much; not within another such block.

    Nothing is reserved where nobody lends. Raises as `check_wanted` meanwhile.
    """
    _end_turn()  # it may wait, and what follows is a library's work
    return nullcontext() if _own.lend is None else _own.lend(num_bytes)


@contextmanager
def wanted_by_others() -> Iterator[None]:
    """Compute within what others wait for too: it goes on when the thread's own caller leaves."""
    left, _own.left = _own.left, None
    try:
        yield
    finally:
        _own.left = left


def check_wanted() -> None:
    """Raise `Unwanted` if the calling thread computes for somebody who has left."""
    if _own.left is not None and _own.left.is_set():
        raise Unwanted


def yield_gil() -> None:
    """Let others run, on a thread in the background that has computed for a `TURN`.

    To be called every 100 us or so, between pieces of a long computation. Raises as
    `check_wanted`.
    """
    check_wanted()
    if time.perf_counter() >= _own.due:
        _end_turn()
        time.sleep(_PAUSE)
        if _own.left is not None:  # else nobody would end it
            _own.has_turn = _turns.acquire(timeout=_PATIENCE)
        _own.due = time.perf_counter() + TURN


def _end_turn() -> None:
    if _own.has_turn:
        _own.has_turn = False
        _turns.release()
