"""Admin routes: prefix cache and sleep."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from inlay.api.admin.schema import (
    Asleep,
    Awake,
    CacheReset,
    IsSleeping,
    WorkerAnswer,
    WorkerSleep,
)
from inlay.commands import ResetPrefixCache, Sleep, WakeUp, name_of
from inlay.errors import InlayError, InvalidRequestError
from inlay.http.server import Call
from inlay.transport.api import Worker

AdminCommand: TypeAlias = ResetPrefixCache | Sleep | WakeUp
"""Commands whose replies `WorkerAnswer` shows."""

WITHIN = 30.0
"""Seconds a worker has to run a command."""

SLEEP_WITHIN = 900.0
"""Seconds a worker has to fall asleep, besides the wait for requests, or to wake up."""

MAX_WAIT = 86_400.0

MIXED = 207
"""Status if a command succeeded on some workers only."""


async def reset_prefix_cache(call: Call) -> None:
    """Clear the prefix cache of every worker; blocks of running requests stay.

    Raises:
        InvalidRequestError: a query is given.
        InlayError: as `tell`.
    """
    call.query()
    status, answers = await call_workers(call, ResetPrefixCache())
    await call.json(CacheReset(status != MIXED, answers), status)


async def sleep(call: Call) -> None:
    """Put the workers of `model`, or all workers, to sleep at `level`.

    Raises:
        InvalidRequestError: the query cannot be read.
        InlayError: as `tell`.
    """
    query = call.query("level", "mode", "wait", "model")
    try:
        level, wait = int(query.get("level", ["1"])[-1]), float(query.get("wait", ["30"])[-1])
    except ValueError as error:
        raise InvalidRequestError(
            "level must be 1 or 2, and wait a number of seconds", param="level"
        ) from error
    if not 0 <= wait <= MAX_WAIT:
        raise InvalidRequestError(
            f"wait must be 0 to {MAX_WAIT:g} seconds, got {wait:g}", param="wait"
        )
    mode = query.get("mode", ["abort"])[-1]
    status, answers = await call_workers(
        call, Sleep(level, mode, wait), SLEEP_WITHIN + wait, _named(query)
    )
    await call.json(Asleep("sleeping", level, answers), status)


async def wake_up(call: Call) -> None:
    """Wake the workers of `model`, or all workers; with `tags`, only these parts.

    Raises:
        InvalidRequestError: the query cannot be read.
        InlayError: as `tell`.
    """
    query = call.query("tags", "model")
    tags = [tag for given in query.get("tags", []) for tag in given.split(",") if tag]
    status, answers = await call_workers(call, WakeUp(tuple(tags)), SLEEP_WITHIN, _named(query))
    awake = all(answer.awake for answer in answers)
    await call.json(Awake("awake" if awake else "sleeping", tags or None, answers), status)


async def is_sleeping(call: Call) -> None:
    """Answer with the sleep level of each worker of `model`, or of all workers.

    Raises `InvalidRequestError`, `NotFoundError`.
    """
    workers = _workers(call, _named(call.query("model")))
    levels = [WorkerSleep(worker.id, worker.card.name, worker.card.asleep) for worker in workers]
    await call.json(IsSleeping(any(worker.level for worker in levels), levels))


def _named(query: dict[str, list[str]]) -> str | None:
    return query.get("model", [None])[-1]


def _workers(call: Call, model: str | None) -> Sequence[Worker]:
    router = call.server.router
    return router.ready() if model is None else router.workers(router.card(model).name)


async def call_workers(
    call: Call, command: AdminCommand, within: float = WITHIN, model: str | None = None
) -> tuple[int, list[WorkerAnswer]]:
    """Run a command on every worker, or on those of one model; return the status and the results.

    Raises:
        OverloadedError: there are no workers.
        NotFoundError: no such model.
        InlayError: all failed; the error has the type of the first, the message names them all.
    """
    workers = _workers(call, model)
    if not workers:
        raise call.server.router.unready()
    found = await asyncio.gather(*(_told(worker, command, within) for worker in workers))
    failed = [
        (worker.id, error)
        for worker, (_, error) in zip(workers, found, strict=True)
        if error is not None
    ]
    if len(failed) == len(workers):
        first = failed[0][1]
        said = "; ".join(f"{name}: {error.message}" for name, error in failed)
        raise type(first)(
            f"{name_of(command)} failed on {len(failed)} of {len(workers)} workers: {said}",
            param=first.param,
            retry_after=first.retry_after,
        )
    return MIXED if failed else 200, [answer for answer, _ in found]


async def _told(
    worker: Worker, command: AdminCommand, within: float
) -> tuple[WorkerAnswer, InlayError | None]:
    id_, model = worker.id, worker.card.name
    try:
        reply = await worker.call(command, within)
    except InlayError as error:
        return WorkerAnswer(id_, model, error.status, error.body()), error
    return WorkerAnswer(id_, model, 200, **msgspec.structs.asdict(reply)), None
