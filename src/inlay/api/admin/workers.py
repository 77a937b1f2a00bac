"""Admin routes: prefix cache, sleep and drain."""

import asyncio
from collections.abc import Sequence
from typing import TypeAlias

import msgspec

from inlay.api.admin.schema import (
    Asleep,
    Awake,
    CacheReset,
    DrainStarted,
    IsSleeping,
    WorkerAnswer,
    WorkerSleep,
)
from inlay.api.parameters import MAX_WAIT
from inlay.base.errors import InlayError, InvalidRequestError, NotFoundError
from inlay.http.quoting import shown_value
from inlay.http.server import Call
from inlay.messages.commands import ResetPrefixCache, Sleep, WakeUp, name_of
from inlay.transport.api import Worker

AdminCommand: TypeAlias = ResetPrefixCache | Sleep | WakeUp
"""Commands whose replies `WorkerAnswer` shows."""

WITHIN = 30.0
"""Seconds a worker has to run a command."""

SLEEP_WITHIN = 900.0
"""Seconds a worker has to fall asleep, besides the wait for requests, or to wake up."""

MIXED = 207
"""Status if a command succeeded on some workers only."""


async def reset_prefix_cache(call: Call) -> None:
    """Clear the prefix cache of every worker; blocks of running requests stay.

    Raises `InlayError`: as `tell`.
    """
    status, answers = await call_workers(call, ResetPrefixCache())
    await call.json(CacheReset(status != MIXED, answers), status)


async def sleep(call: Call) -> None:
    """Put the workers of `model`, one `worker`, or all workers, to sleep at `level`.

    Raises:
        InvalidRequestError: the query cannot be read.
        InlayError: as `tell`.
    """
    query = call.query()
    level = query.get("level", ["1"])[-1]
    if level not in ("1", "2"):
        raise InvalidRequestError(f"level must be 1 or 2, got {shown_value(level)}", param="level")
    try:
        wait = float(query.get("wait", ["30"])[-1])
    except ValueError as error:
        raise InvalidRequestError("wait must be a number of seconds", param="wait") from error
    if not 0 <= wait <= MAX_WAIT:
        raise InvalidRequestError(
            f"wait must be 0 to {MAX_WAIT:g} seconds, got {wait:g}", param="wait"
        )
    mode = query.get("mode", ["abort"])[-1]
    workers = _workers(call, query)
    status, answers = await call_workers(
        call, Sleep(int(level), mode, wait), SLEEP_WITHIN + wait, workers
    )
    await call.json(Asleep("sleeping", int(level), answers), status)


async def wake_up(call: Call) -> None:
    """Wake the workers of `model`, one `worker`, or all workers; with `tags`, only these parts.

    Raises:
        InvalidRequestError: the query cannot be read.
        InlayError: as `tell`.
    """
    query = call.query()
    tags = [tag for given in query.get("tags", []) for tag in given.split(",") if tag]
    status, answers = await call_workers(
        call, WakeUp(tuple(tags)), SLEEP_WITHIN, _workers(call, query)
    )
    awake = all(answer.awake for answer in answers)
    await call.json(Awake("awake" if awake else "sleeping", tags or None, answers), status)


async def is_sleeping(call: Call) -> None:
    """Answer with the sleep level of each worker of `model`, of one `worker`, or of all workers.

    Raises `InvalidRequestError`, `NotFoundError`.
    """
    workers = _workers(call, call.query())
    levels = [WorkerSleep(worker.id, worker.card.name, worker.card.asleep) for worker in workers]
    await call.json(IsSleeping(any(worker.level for worker in levels), levels))


async def drain(call: Call) -> None:
    """Have one `worker` of a fleet drain and end, as with SIGTERM.

    Raises:
        InvalidRequestError: no worker is named, or this is no fleet.
        NotFoundError: no such worker.
        DeadlineExceededError: the worker did not say that it drains.
    """
    query = call.query()
    if "worker" not in query:
        raise InvalidRequestError("name the worker to drain: ?worker=ID", param="worker")
    (worker,) = _workers(call, query)
    plane = call.server.router.drains()
    if plane is None:
        raise InvalidRequestError("the worker of this server drains when the server is stopped")
    await plane.drain(worker.id)
    await call.json(DrainStarted("draining", worker.id))


def _workers(call: Call, query: dict[str, list[str]]) -> Sequence[Worker]:
    """Return the workers that a query names by `worker` or `model`; without either, all.

    Raises:
        InvalidRequestError: both are given.
        NotFoundError: no such worker, or model.
    """
    router = call.server.router
    model, id_ = query.get("model", [None])[-1], query.get("worker", [None])[-1]
    if model is not None and id_ is not None:
        raise InvalidRequestError("give one of model and worker, not both", param="worker")
    if model is not None:
        return router.workers(router.card(model).name)
    if id_ is None:
        return router.ready()
    found = [worker for worker in router.ready() if worker.id == id_]
    if not found:
        known = ", ".join(worker.id for worker in router.ready()) or "none"
        raise NotFoundError(f"no worker {id_[:80]!r} is ready; ready: {known}", param="worker")
    return found


async def call_workers(
    call: Call,
    command: AdminCommand,
    within: float = WITHIN,
    workers: Sequence[Worker] | None = None,
) -> tuple[int, list[WorkerAnswer]]:
    """Run a command on these workers, or on all; return the status and the results.

    Raises:
        OverloadedError: there are no workers.
        InlayError: all failed; the error has the type of the first, the message names them all.
    """
    workers = call.server.router.ready() if workers is None else workers
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
