"""The echo engine: one receiver's fault is of its request alone."""

import asyncio

from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output
from tests.engine.conformance import SECRET, make_request
from tests.transport.conftest import echo_settings

__all__ = ["echo_settings"]

PROMPT = Prompt.of(Tokens([1, 2]))


async def test_a_receiver_that_raises_harms_no_other(echo_settings: EngineSettings) -> None:
    def broken(output: Output) -> None:
        raise ValueError(f"cannot take {output.offset}")

    engine = EchoEngine(echo_settings, SECRET)
    await engine.start()
    engine.submit(make_request("broken", PROMPT), broken)
    last = asyncio.get_running_loop().create_future()

    def take(output: Output) -> None:
        if output.finish_reason is not None:
            last.set_result(output.finish_reason)

    engine.submit(make_request("whole", PROMPT), take)
    async with asyncio.timeout(60):
        assert await last == "length"
    assert engine.stats().running == 0
