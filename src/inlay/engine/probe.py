"""Probe of an engine: one token through the model, before all other requests."""

import asyncio
import time
from collections.abc import Callable, Sequence
from itertools import count

from inlay.base.errors import EngineError
from inlay.engine.api import Engine
from inlay.messages.priority import FIRST
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Emit, Output, Pooling, Request, Sampling, Task

_ONE_TOKEN = Sampling(max_tokens=1, temperature=0.0)

_numbers = count()


async def outputs_of(
    request_id: str, submit: Callable[[Emit], object], abort: Callable[[str], object]
) -> Sequence[Output]:
    """Submit a request and return its outputs; it is aborted when this is cancelled."""
    outputs: list[Output] = []
    done: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def emit(output: Output) -> None:
        outputs.append(output)
        if output.finish_reason is not None and not done.done():
            done.set_result(None)

    submit(emit)
    try:
        await done
        return outputs
    finally:
        abort(request_id)


async def last_output(
    request_id: str, submit: Callable[[Emit], object], abort: Callable[[str], object]
) -> Output:
    return (await outputs_of(request_id, submit, abort))[-1]


def probe_failed(last: Output) -> EngineError:
    """Return the error of a probe that ended with `last`."""
    return EngineError(last.error.message if last.error else "the engine closed during the probe")


async def probe(
    engine: Engine, task: Task = Task.GENERATE, params: Sampling | Pooling = _ONE_TOKEN
) -> float:
    """Run one token through the model; return the seconds it took.

    Raises:
        EngineError: the engine has failed.
    """
    started = time.monotonic()
    request = Request(
        id=f"probe-{next(_numbers)}",
        task=task,
        prompts=(Prompt.of(Tokens((0,))),),
        params=params,
        priority=FIRST,
    )
    last = await last_output(request.id, lambda emit: engine.submit(request, emit), engine.abort)
    if not (last.token_ids or last.payloads):
        raise probe_failed(last)
    return time.monotonic() - started
