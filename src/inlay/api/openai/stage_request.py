"""The request of a pipeline's stage that is not a language model."""

from collections.abc import Sequence

from inlay.http.server import Call
from inlay.request import Diffusion, Input, Request, Task
from inlay.speech import Speech


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
        f"{call.request_id}-{id_}-{stage}",
        params,
        task=Task.STAGE,
        priority=priority,
        inputs=tuple(inputs),
    )
