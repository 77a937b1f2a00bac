"""Background requests for vectors, joined into fewer requests to an engine.

A batch of embeddings has a text a line. Sent one by one they cost an engine more than some tens of
them together. While `AT_ONCE` joined requests are under way, further ones gather; so nobody waits
for a timer. All of one request are a client's, for one model, under one salt.
"""

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Any, TypeAlias, TypeVar

from inlay.base.errors import InlayError

AT_ONCE = 2
MOST_PROMPTS = 32
MOST_POSITIONS = 8192

T = TypeVar("T")
R = TypeVar("R")

_Send: TypeAlias = Callable[[Sequence[Any]], Awaitable[Sequence[Any]]]


class _JoinedCall:
    """Inputs of one call, and their results to come."""

    __slots__ = ("inputs", "positions", "results", "send")

    def __init__(self, inputs: Sequence[Any], positions: int, send: _Send) -> None:
        self.inputs = inputs
        self.send = send
        self.positions = positions
        self.results: asyncio.Future[Sequence[Any]] = asyncio.get_running_loop().create_future()


class _JoinableInputs:
    """Inputs that may be joined."""

    __slots__ = ("sending", "waiting")

    def __init__(self) -> None:
        self.waiting: deque[_JoinedCall] = deque()
        self.sending: set[asyncio.Task[None]] = set()


class Joining:
    """Joins what calls ask for at the same time, by key."""

    def __init__(self) -> None:
        self._lines: dict[Hashable, _JoinableInputs] = {}

    async def results(
        self,
        key: Hashable,
        inputs: Sequence[T],
        positions: int,
        send: Callable[[Sequence[T]], Awaitable[Sequence[R]]],
    ) -> list[R]:
        """Return a result for each input.

        Args:
            key: inputs of one key may be in one request.
            inputs: of one call; they stay together.
            positions: of all of them.
            send: sends inputs to an engine as one request, and returns a result for each; it may be
                given those of other calls too.

        Raises:
            InlayError: as `send` of these alone: they do not fail for others.
        """
        asked = _JoinedCall(inputs, positions, send)
        line = self._lines.setdefault(key, _JoinableInputs())
        line.waiting.append(asked)
        self._go_on(key, line)
        return list(await asked.results)

    def _go_on(self, key: Hashable, line: _JoinableInputs) -> None:
        while line.waiting and len(line.sending) < AT_ONCE:
            if group := _next_group(line.waiting):
                task = asyncio.create_task(_send(group))
                line.sending.add(task)
                task.add_done_callback(lambda task: self._ended(key, line, task))
        if not line.waiting and not line.sending:
            self._lines.pop(key, None)

    def _ended(self, key: Hashable, line: _JoinableInputs, task: "asyncio.Task[None]") -> None:
        line.sending.discard(task)
        self._go_on(key, line)


def _next_group(waiting: deque[_JoinedCall]) -> list[_JoinedCall]:
    """Take the next that go together, those that nobody waits for left out."""
    group: list[_JoinedCall] = []
    inputs = positions = 0
    while waiting:
        asked = waiting[0]
        inputs += len(asked.inputs)
        positions += asked.positions
        if group and (inputs > MOST_PROMPTS or positions > MOST_POSITIONS):
            break
        waiting.popleft()
        if not asked.results.done():
            group.append(asked)
    return group


async def _send(group: Sequence[_JoinedCall]) -> None:
    try:
        found = await group[0].send([one for asked in group for one in asked.inputs])
    except InlayError as error:
        if len(group) > 1:
            # One of them may be at fault: each is tried alone, and has its own error.
            for asked in group:
                await _send([asked])
        elif not group[0].results.done():
            group[0].results.set_exception(error)
        return
    except BaseException as error:
        for asked in group:
            if not asked.results.done():
                asked.results.set_exception(error)
        raise
    start = 0
    for asked in group:
        stop = start + len(asked.inputs)
        if not asked.results.done():
            asked.results.set_result(found[start:stop])
        start = stop
