"""What stands between a plane and an engine of vectors."""

import pytest
from msgspec.structs import replace

from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.commands import AnyCommand, Drain
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Emit, Output, Pooling, Request, Sampling, Task
from inlay.worker.host import EngineHost
from tests.transport.conftest import echo_settings

__all__ = ["echo_settings"]

REQUEST = Request(id="one", task=Task.EMBED, prompts=(Prompt.of(Tokens([1, 2])),), params=Pooling())


class Broken(EchoEngine):
    def submit(self, request: Request, emit: Emit) -> None:
        raise ZeroDivisionError


async def answer_of(
    engine: EchoEngine, *commands: AnyCommand, request: Request = REQUEST
) -> Output:
    await engine.start()
    host = EngineHost(engine)
    for command in commands:
        await host.call(command)
    found: list[Output] = []
    host.submit(request, found.append)
    (answer,) = found
    return answer


async def test_a_draining_worker_answers_that_it_is(echo_settings: EngineSettings) -> None:
    answer = await answer_of(EchoEngine(echo_settings, Secret(bytes(32))), Drain())
    assert answer.error is not None
    assert "draining" in answer.error.message


async def test_an_engine_that_fails_to_admit_still_answers(echo_settings: EngineSettings) -> None:
    answer = await answer_of(Broken(echo_settings, Secret(bytes(32))))
    assert answer.error is not None
    assert (answer.error.kind, answer.finish_reason) == ("EngineError", "error")


async def test_a_task_that_the_model_does_not_have_is_refused(
    echo_settings: EngineSettings,
) -> None:
    scored = replace(REQUEST, task=Task.SCORE)
    answer = await answer_of(EchoEngine(echo_settings, Secret(bytes(32))), request=scored)
    assert answer.error is not None
    assert "does not score pairs of texts" in answer.error.message


@pytest.mark.parametrize(
    ("task", "prompts", "params"),
    [
        (Task.EMBED, 1, Sampling(max_tokens=1)),
        (Task.GENERATE, 1, Pooling()),
        (Task.GENERATE, 2, Sampling(max_tokens=1)),
        (Task.GENERATE, 0, Sampling(max_tokens=1)),
        (Task.SCORE, 0, Pooling()),
    ],
)
def test_a_request_whose_task_has_other_parameters_is_none(
    task: Task, prompts: int, params: Sampling | Pooling
) -> None:
    with pytest.raises(ValueError, match="allowed: one prompt and Sampling to generate"):
        Request(id="x", task=task, prompts=REQUEST.prompts * prompts, params=params)
