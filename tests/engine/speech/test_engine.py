"""`SpeechEngine`: ends of what it hears."""

import asyncio
import io
import sys
import weakref
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import soundfile
import torch

from inlay.base.errors import (
    LEASE_LOST,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from inlay.engine.settings import EngineSettings
from inlay.media.sound_files import FORMATS
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.messages.request import Input, Output, Payload, Request, Task
from inlay_stages.engines.speech.engine import SpeechEngine
from inlay_stages.engines.speech.job import TurnPayloads
from inlay_stages.engines.speech.talker import Talk
from inlay_stages.params import Speech
from inlay_stages.worker.input_stream import InputStream
from tests.engine.speech.test_speech import states
from tests.omni_models import omni

PROMPT = 3


@asynccontextmanager
async def running(part: str) -> AsyncIterator[SpeechEngine]:
    settings = EngineSettings.of(model=str(omni()), engine="speech", part=part, device="cpu")
    engine = SpeechEngine(settings, Secret(bytes(32)))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.close()


@pytest.fixture
async def talker() -> AsyncIterator[SpeechEngine]:
    async with running("talker") as engine:
        yield engine


def heard(positions: int) -> list[Input]:
    rows = torch.randn(positions, 64, generator=torch.Generator().manual_seed(1))
    return [states(0, rows), states(3, rows)]


@pytest.mark.parametrize("at_once", [True, False])
async def test_a_text_that_breaks_off_is_an_error_and_no_end_of_the_sound(
    talker: SpeechEngine, at_once: bool
) -> None:
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    inflow = InputStream()
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


async def test_a_sound_without_memory_is_an_error_and_the_others_go_on(
    talker: SpeechEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    advance = Talk.advance

    def limited(talk: Talk, *given: Any, **more: Any) -> TurnPayloads:
        if len(talk.codes) == 3 and talk._params.max_tokens == 20:
            torch.empty(1 << 62, dtype=torch.uint8)
        return advance(talk, *given, **more)

    monkeypatch.setattr(Talk, "advance", limited)
    ends: asyncio.Queue[Output] = asyncio.Queue()
    for most in 20, 19:
        params = Speech(voice="Ethan", prompt_tokens=PROMPT, seed=3, max_tokens=most)
        given = tuple(heard(PROMPT + 4))
        talker.submit(
            Request(id=str(most), task=Task.STAGE, prompts=(), params=params, inputs=given),
            lambda output: ends.put_nowait(output) if output.finish_reason else None,
        )
    found = {output.request_id: output for output in [await ends.get(), await ends.get()]}
    error = found["20"].error
    assert error is not None
    assert "the worker's memory is too small for this request" in error.message
    assert found["19"].finish_reason in ("stop", "length")
    assert talker.stats().running == talker.stats().waiting == 0


async def answer(engine: SpeechEngine, inputs: Sequence[Input]) -> list[bytes]:
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    params = Speech(voice="Ethan", prompt_tokens=PROMPT, seed=3, max_tokens=6, chunk=2)
    request = Request(id="r", task=Task.STAGE, prompts=(), params=params, inputs=tuple(inputs))
    engine.submit(request, outputs.put_nowait)
    found = [await outputs.get()]
    while found[-1].finish_reason is None:
        found.append(await outputs.get())
    assert found[-1].error is None
    return [bytes(payload.data.view) for output in found for payload in output.payloads]


CODES = Input(
    "codes",
    Payload("codes", "int32", (40,), Buffer(np.arange(40, dtype=np.int32).tobytes()), last=True),
)


async def vocoded(engine: SpeechEngine, **how: Any) -> tuple[list[Payload], Output]:
    """Payloads and the end of the sound of `CODES`."""
    outputs: asyncio.Queue[Output] = asyncio.Queue()
    params = Speech(voice="Ethan", seed=3, **how)
    request = Request(id="r", task=Task.STAGE, prompts=(), params=params, inputs=(CODES,))
    engine.submit(request, outputs.put_nowait)
    found = [await outputs.get()]
    while found[-1].finish_reason is None:
        found.append(await outputs.get())
    return [payload for output in found for payload in output.payloads], found[-1]


def joined(payloads: Sequence[Payload], port: str) -> bytes:
    return b"".join(bytes(each.data.view) for each in payloads if each.port == port)


@pytest.mark.slow
async def test_a_sound_is_a_stream_or_whole_or_a_file_of_the_same_samples(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    async with running("token2wav") as engine:
        streamed, end = await vocoded(engine, chunk=2)
        assert len(streamed) > 1
        at_once, _ = await vocoded(engine, chunk=0)
        whole, whole_end = await vocoded(engine, chunk=2, port="sound")
        assert [(each.port, each.dtype, each.shape) for each in whole] == [
            ("sound", "float32", at_once[0].shape)
        ]
        assert joined(whole, "sound") == joined(at_once, "audio")
        samples = np.frombuffer(joined(streamed, "audio"), np.float32)
        for format_, (media_type, *_) in FORMATS.items():
            payloads, file_end = await vocoded(engine, chunk=2, port="file", format=format_)
            assert [each.port for each in payloads] == ["file.type", "file"]
            assert joined(payloads, "file.type") == media_type
            assert file_end.usage == whole_end.usage == end.usage
            if format_ in ("wav", "flac"):
                found, rate = soundfile.read(io.BytesIO(joined(payloads, "file")), dtype="int16")
                assert rate == 24000
                assert np.array_equal(found, np.rint(32767 * samples.astype(np.float64)))
        monkeypatch.setitem(sys.modules, "soundfile", None)
        with pytest.raises(InvalidRequestError, match="format is 'mp3'; this machine lacks libsnd"):
            await vocoded(engine, port="file", format="mp3")
        assert engine.stats().waiting == 0


@pytest.mark.thorough
@pytest.mark.parametrize("part", ["talker", "token2wav"])
async def test_a_sleeping_part_has_no_model_and_wakes_with_the_same_answers(part: str) -> None:
    given = [CODES] if part == "token2wav" else heard(PROMPT + 4)
    async with running(part) as engine:
        before = await answer(engine, given)
        model = weakref.ref(engine._loaded.model)
        left = Request(
            id="left",
            task=Task.STAGE,
            prompts=(),
            params=Speech(voice="Ethan", prompt_tokens=PROMPT),
        )
        engine.submit_fed(left, lambda _: None, InputStream())
        with pytest.raises(EngineError, match="1 requests are under way"):
            await engine.sleep(1)
        engine.abort(left.id)
        await engine.sleep(1)
        await engine.sleep(2)
        assert model() is None
        with pytest.raises(OverloadedError, match="asleep"):
            engine.submit(left, lambda _: None)
        assert not await engine.wake_up(["weights"])
        assert await engine.wake_up(["kv_cache"])
        assert await answer(engine, given) == before
        assert before
