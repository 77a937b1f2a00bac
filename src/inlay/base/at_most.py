"""Coroutines that run side by side, a bounded number at a time."""

import asyncio
from collections.abc import Callable, Coroutine, Iterable
from typing import Any, TypeVar

T = TypeVar("T")


async def at_most(number: int, jobs: Iterable[Callable[[], Coroutine[Any, Any, T]]]) -> list[T]:
    """Run `jobs`, at most `number` at a time, and return their results in order.

    The first error is raised, once all others have been cancelled.
    """
    window, tasks = asyncio.Semaphore(number), []
    try:
        async with asyncio.TaskGroup() as group:
            for job in jobs:
                await window.acquire()
                task = group.create_task(job())
                task.add_done_callback(lambda _: window.release())
                tasks.append(task)
    except BaseExceptionGroup as failed:
        raise failed.exceptions[0] from failed
    return [task.result() for task in tasks]
