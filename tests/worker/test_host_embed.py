"""What stands between a plane and an engine of vectors."""

from inlay.digest import Secret
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.prompt import Prompt, Tokens
from inlay.request import Command, EmbedOutput, EmbedRequest, EmitEmbedOutput
from inlay.worker.host import EngineHost
from tests.transport.conftest import echo_settings

__all__ = ["echo_settings"]

WORK = EmbedRequest(id="one", prompts=(Prompt.of(Tokens([1, 2])),))


class Broken(EchoEngine):
    def embed(self, request: EmbedRequest, emit: EmitEmbedOutput) -> None:
        raise ZeroDivisionError


async def answer_of(engine: EchoEngine, *commands: Command) -> EmbedOutput:
    await engine.start()
    host = EngineHost(engine)
    for command in commands:
        await host.call(command)
    found: list[EmbedOutput] = []
    host.embed(WORK, found.append)
    (answer,) = found
    return answer


async def test_a_draining_worker_answers_that_it_is(echo_settings: EngineSettings) -> None:
    answer = await answer_of(EchoEngine(echo_settings, Secret(bytes(32))), Command("drain"))
    assert answer.error is not None
    assert "draining" in answer.error.message


async def test_an_engine_that_fails_to_admit_still_answers(echo_settings: EngineSettings) -> None:
    answer = await answer_of(Broken(echo_settings, Secret(bytes(32))))
    assert answer.error is not None
    assert (answer.error.kind, len(answer.data)) == ("EngineError", 0)
