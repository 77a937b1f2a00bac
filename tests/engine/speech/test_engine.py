"""`SpeechEngine`: ends of what it hears."""

import asyncio
from collections.abc import AsyncIterator

import pytest
import torch

from inlay.digest import Secret
from inlay.engine.inflow import Inflow
from inlay.engine.settings import EngineSettings
from inlay.engine.speech.engine import SpeechEngine
from inlay.errors import LEASE_LOST, NotFoundError
from inlay.request import Input, Output, Request, Task
from inlay.speech import Speech
from tests.engine.speech.test_speech import states
from tests.omni_models import omni

PROMPT = 3


@pytest.fixture
async def talker() -> AsyncIterator[SpeechEngine]:
    settings = EngineSettings.model_validate(
        {"model": str(omni()), "engine": "speech", "part": "talker", "device": "cpu"}
    )
    engine = SpeechEngine(settings, Secret(bytes(32)))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


def heard(positions: int) -> list[Input]:
    rows = torch.randn(positions, 64, generator=torch.Generator().manual_seed(1))
    return [states(0, rows), states(3, rows)]


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_text_that_breaks_off_is_an_error_and_no_end_of_the_sound(
    talker: SpeechEngine, at_once: bool
) -> None:
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    inflow = Inflow()
    params = Speech(voice="Ethan", prompt_tokens=PROMPT, temperature=0, max_tokens=40)
    request = Request(id="r", task=Task.STAGE, prompts=(), params=params)
    talker.submit_fed(request, outputs.put_nowait, inflow)
    inflow.put(heard(PROMPT + 4))
    if not at_once:
        await outputs.get()
    inflow.end(NotFoundError("the payload is not kept any more", code=LEASE_LOST))
    while (output := await outputs.get()).finish_reason is None:
        pass
    assert output.finish_reason == "error"
    assert output.error is not None
    assert output.error.code == LEASE_LOST


@pytest.mark.parametrize(("most", "reason"), [(2, "length"), (400, "stop")])
async def test_a_talker_that_may_make_no_more_codes_says_so(
    talker: SpeechEngine, most: int, reason: str
) -> None:
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    params = Speech(voice="Ethan", prompt_tokens=PROMPT, seed=3, max_tokens=most)
    given = tuple(heard(PROMPT + 4))
    talker.submit(
        Request(id="r", task=Task.STAGE, prompts=(), params=params, inputs=given),
        outputs.put_nowait,
    )
    while (output := await outputs.get()).finish_reason is None:
        pass
    assert output.finish_reason == reason
    assert output.usage is not None
    assert (output.usage.completion_tokens == most) == (reason == "length")
