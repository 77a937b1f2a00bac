"""Answers to futures of the event loop, which their askers may have left."""

import asyncio
from collections.abc import Callable, Iterable
from functools import partial
from typing import TypeVar

from inlay.engine.torch.step import Core
from inlay.errors import InlayError
from inlay.request import Output

_T = TypeVar("_T")


def resolve(future: "asyncio.Future[_T]", value: _T) -> None:
    """Set the result, unless the future is done."""
    if not future.done():
        future.set_result(value)


def reject(future: "asyncio.Future[_T]", error: InlayError) -> None:
    """Set the error, unless the future is done."""
    if not future.done():
        future.set_exception(error)


def answering(
    question: Callable[[Core], _T],
    future: "asyncio.Future[_T]",
    call: Callable[[Callable[[], object]], None],
) -> Callable[[Core], Iterable[Output]]:
    """Return a command that answers `question` to `future`, through `call` to its event loop."""

    def answer(core: Core) -> Iterable[Output]:
        try:
            found = question(core)
        except InlayError as error:
            call(partial(reject, future, error))
        else:
            call(partial(resolve, future, found))
        return ()

    return answer
