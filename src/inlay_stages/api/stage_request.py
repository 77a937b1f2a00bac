"""The steps of a pipeline's plan: places at their stages, and the requests of these."""

import uuid
from collections.abc import Sequence

from inlay.http.server import Call, Server
from inlay.messages.request import Input, Request, Task
from inlay_stages.params import Diffusion, Speech
from inlay_stages.walk import Step, admitted


def take_places(call: Call, steps: Sequence[Step], count: int = 1) -> None:
    """Take places at every stage of a plan until the call ends, before any has worked.

    Args:
        call: of the client.
        steps: of the plan.
        count: as of `inlay_stages.walk.admitted`.

    Raises:
        OverloadedError: a stage is asleep, and requests do not wait for that.
        RateLimitedError: one of them is full.
    """
    for step in steps:
        call.server.check_awake(step.model, _task(step))
    call.ending.enter_context(admitted(call.server.router, steps, call.client, count))


async def all_awake(server: Server, steps: Sequence[Step]) -> None:
    """Wait until no stage of a plan is asleep, where requests wait for that."""
    for step in steps:
        await server.awake(step.model, _task(step))


def _task(step: Step) -> Task:
    # A plan begins with a language model where that has a prompt of its own.
    return Task.STAGE if step.edges else Task.GENERATE


def engine_id(call: Call, id_: str, stage: str) -> str:
    """Return the id of a request to a stage, of the answer's `id_`.

    It is a new one each time: clients choose the ids of their requests and answers, and two may
    choose alike.
    """
    return f"{call.request_id}-{id_}-{stage}-{uuid.uuid4().hex}"


def stage_request(
    call: Call,
    id_: str,
    params: Diffusion | Speech,
    priority: int,
    stage: str,
    inputs: Sequence[Input],
) -> Request:
    """Return the request of a stage.

    Args:
        call: of the client.
        id_: of the answer.
        params: of the stage.
        priority: of the client's request.
        stage: name that it is served under.
        inputs: outputs of the stages before it.
    """
    return call.engine_request(
        engine_id(call, id_, stage),
        params,
        task=Task.STAGE,
        priority=priority,
        inputs=tuple(inputs),
    )
