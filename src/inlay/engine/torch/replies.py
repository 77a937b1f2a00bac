"""Answers to futures of the event loop, which their askers may have left."""

import asyncio
from typing import TypeVar

from inlay.errors import InlayError

_T = TypeVar("_T")


def resolve(future: "asyncio.Future[_T]", value: _T) -> None:
    """Set the result, unless the future is done."""
    if not future.done():
        future.set_result(value)


def reject(future: "asyncio.Future[_T]", error: InlayError) -> None:
    """Set the error, unless the future is done."""
    if not future.done():
        future.set_exception(error)


__all__ = ["reject", "resolve"]
