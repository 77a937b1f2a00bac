"""Operations for those who run the server."""

import asyncio
from collections.abc import Sequence

from inlay.errors import InlayError, OverloadedError
from inlay.frontend.clients import RETRY_AFTER
from inlay.frontend.server import Call
from inlay.protocol.openai.admin import PrefixCacheReset, WorkerReset
from inlay.protocol.work import Command, Reply, Worker

WITHIN = 30.0
"""Seconds a worker has to do what it is told."""


async def reset_prefix_cache(call: Call) -> None:
    """Have every worker forget the cached blocks that nothing running uses.

    Raises:
        InlayError: a worker did not; the others have.
    """
    workers = call.server.router.ready()
    replies = await tell_all(workers, Command("reset_prefix_cache"))
    done = [
        WorkerReset(worker.id, worker.card.name, int(reply.value["blocks"] or 0))
        for worker, reply in zip(workers, replies, strict=True)
    ]
    await call.json(PrefixCacheReset(done))


async def tell_all(workers: Sequence[Worker], command: Command) -> list[Reply]:
    """Every worker's answer to a command.

    Raises:
        OverloadedError: there are no workers.
        InlayError: some failed; the kind is that of the first, the message names them all.
    """
    if not workers:
        raise OverloadedError("no worker is ready", retry_after=RETRY_AFTER)
    answers = await asyncio.gather(*(_tell(worker, command) for worker in workers))
    failed = [
        (worker.id, answer)
        for worker, answer in zip(workers, answers, strict=True)
        if isinstance(answer, InlayError)
    ]
    if failed:
        first = failed[0][1]
        said = "; ".join(f"{name}: {error.message}" for name, error in failed)
        raise type(first)(
            f"{command.name} failed on {len(failed)} of {len(workers)} workers: {said}",
            retry_after=first.retry_after,
        )
    return [answer for answer in answers if isinstance(answer, Reply)]


async def _tell(worker: Worker, command: Command) -> Reply | InlayError:
    try:
        reply = await worker.call(command, WITHIN)
    except InlayError as error:
        return error
    return reply if reply.error is None else reply.error.to_error()
