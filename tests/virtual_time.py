"""An event loop whose clock stands still while there is something to do, and else jumps ahead."""

import asyncio
import selectors
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")

_GRACE_SECONDS = 0.002
"""Real seconds in which a message between two sockets of this process comes."""


class _Selector(selectors.DefaultSelector):
    """Waits for nothing but what comes at once; what would be waited is `passed`."""

    passed = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        found = super().select(0 if timeout == 0 else _GRACE_SECONDS)
        if not found and timeout:
            self.passed += timeout
        return found


class _Loop(asyncio.SelectorEventLoop):
    def __init__(self) -> None:
        self._passing = _Selector()
        super().__init__(self._passing)

    def time(self) -> float:
        return self._passing.passed


def run(main: Coroutine[Any, Any, T]) -> T:
    """Run as `asyncio.run`, in such a loop."""
    with asyncio.Runner(loop_factory=_Loop) as runner:
        return runner.run(main)
