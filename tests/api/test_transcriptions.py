"""Transcriptions and translations, with the real client of OpenAI and models of sound."""

import asyncio
import base64
import io
import json
import os
import shutil
import signal
import threading
import time
import wave
from collections.abc import AsyncIterator, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.api.openai.transcriptions import route
from inlay.base.pace import check_wanted
from inlay.media import unpacking
from inlay.media.sounds import quiet_cuts
from inlay.media.unpacking import unpacked
from inlay.messages.prompt import Buffer
from tests.audio_models import AUDIO_FAMILIES, RATE, audio
from tests.equality.test_sound_and_video_over_http import TEMPLATES
from tests.examples import examples
from tests.live import Fleet, fleet
from tests.media.test_unpacking import KINDS, recorded
from tests.payloads import error
from tests.scratch import scratch

SECONDS = 3.2


def sound_file(seconds: float = SECONDS, channels: int = 1, rate: int = RATE) -> bytes:
    """A WAV of noise with a quiet place each 0.8 s."""
    count = int(seconds * rate)
    drawn = np.random.default_rng(5).normal(0, 0.2, count)
    places = np.arange(count) / rate % 0.8
    drawn[(places > 0.7) & (places < 0.76)] = 0
    samples = (np.clip(drawn, -1, 1) * 32767).astype("<i2")
    file = io.BytesIO()
    with wave.open(file, "wb") as out:
        out.setparams((channels, 2, rate, count, "NONE", ""))
        out.writeframes(np.repeat(samples[:, None], channels, axis=1).tobytes())
    return file.getvalue()


@cache
def with_template(family: str) -> Path:
    folder = scratch("transcriptions") / family
    shutil.copytree(audio(family), folder)
    (folder / "chat_template.jinja").write_text(TEMPLATES[family], encoding="utf-8")
    return folder


@pytest.fixture(scope="module", params=AUDIO_FAMILIES)
def hearing(request: pytest.FixtureRequest) -> Iterator[Fleet]:
    with fleet(with_template(request.param)) as running:
        yield running


@pytest.fixture(scope="module")
def hearing_url(hearing: Fleet) -> str:
    return hearing.serve()


@pytest.fixture
def client(hearing_url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=hearing_url + "/v1", api_key="none", max_retries=0) as made:
        yield made


def ask(client: openai.OpenAI, data: bytes | None = None, **more: Any) -> Any:
    extra = {"max_completion_tokens": "6", **more.pop("extra_body", {})}
    file = ("a.wav", sound_file() if data is None else data)
    return client.audio.transcriptions.create(model="tiny", file=file, extra_body=extra, **more)


@pytest.mark.thorough
def test_every_format_is_what_the_client_takes(client: openai.OpenAI) -> None:
    whole = ask(client)
    assert whole.text
    assert whole.usage.type == "tokens"
    assert whole.usage.total_tokens == whole.usage.input_tokens + whole.usage.output_tokens
    assert ask(client, response_format="text") == whole.text + "\n"
    verbose = ask(client, response_format="verbose_json", language="en")
    assert verbose.text is not None
    assert float(verbose.duration) == SECONDS
    assert verbose.segments is None
    assert verbose.language == "en"
    srt = ask(client, response_format="srt")
    assert srt.startswith("1\n00:00:00,000 --> 00:00:0")
    assert "00:00:03,200" in srt
    vtt = ask(client, response_format="vtt")
    assert vtt.startswith("WEBVTT\n\n00:00:00.000 --> ")
    with pytest.warns(
        DeprecationWarning, match="deprecated"
    ):  # the client's own word for the route
        english: Any = client.audio.translations.create(
            model="tiny", file=("a.wav", sound_file()), extra_body={"max_completion_tokens": "6"}
        )
    assert english.text


@pytest.mark.parametrize("route", ["transcriptions", "completions"])
async def test_a_client_that_leaves_ends_the_decoding(
    hearing_url: str, monkeypatch: pytest.MonkeyPatch, route: str
) -> None:
    began, ended = threading.Event(), threading.Event()

    def endless(data: Buffer, hold: Callable[[int], None]) -> Buffer:
        began.set()
        try:
            while True:
                check_wanted()
                time.sleep(0.01)
        finally:
            ended.set()

    monkeypatch.setattr(unpacking, "unpacked", endless)
    data = recorded(*KINDS["Ogg Vorbis"][:3])
    sound = {"data": base64.b64encode(data).decode(), "format": "ogg"}
    said = [{"role": "user", "content": [{"type": "input_audio", "input_audio": sound}]}]
    async with httpx.AsyncClient(base_url=hearing_url + "/v1", timeout=60) as client:
        if route == "completions":
            asked = client.post("/chat/completions", json={"model": "tiny", "messages": said})
        else:
            asked = client.post(
                "/audio/transcriptions", data={"model": "tiny"}, files={"file": ("a.ogg", data)}
            )
        asking = asyncio.create_task(asked)
        assert await asyncio.to_thread(began.wait, 60)
        asking.cancel()
        assert await asyncio.to_thread(ended.wait, 60)


@pytest.mark.parametrize("name", ["WebM Opus", "M4A AAC", "Ogg Vorbis"])
def test_sound_in_a_container_is_heard_as_its_samples_are(client: openai.OpenAI, name: str) -> None:
    data = recorded(*KINDS[name][:3])
    same = bytes(unpacked(Buffer(data), lambda _: None).view)
    texts = [ask(client, each, temperature=0).text for each in (data, same)]
    assert texts[0] == texts[1]

    def chat(file: bytes, form: Any) -> Any:
        sound = {"data": base64.b64encode(file).decode(), "format": form}
        parts: Any = [{"type": "input_audio", "input_audio": sound}, {"type": "text", "text": "a"}]
        answer: Any = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": parts}], max_tokens=6, temperature=0
        )
        return answer.choices[0].message.content, answer.usage.prompt_tokens

    assert chat(data, "webm") == chat(same, "wav")


def test_a_stream_has_openais_events(client: openai.OpenAI) -> None:
    events = list(ask(client, stream=True))
    kinds = {event.type for event in events[:-1]}
    assert kinds == {"transcript.text.delta"}
    assert events[-1].type == "transcript.text.done"
    text = "".join(event.delta for event in events[:-1])
    assert events[-1].text == text
    assert " ".join(text.split()) == " ".join(ask(client).text.split())


def test_the_text_is_that_of_a_chat_about_each_piece(client: openai.OpenAI, hearing: Fleet) -> None:
    """Pieces are cut in quiet places, and stand in their order."""
    srt = ask(client, response_format="srt")
    blocks = srt.strip().split("\n\n")
    assert len(blocks) > 1
    ends = [
        float(block.split("\n")[1].partition(" --> ")[2][6:].replace(",", ".")) for block in blocks
    ]
    for end in ends[:-1]:
        assert 0.7 <= end % 0.8 <= 0.77
    assert ends[-1] == SECONDS
    body = sound_file()
    first = io.BytesIO()
    with wave.open(io.BytesIO(body)) as source, wave.open(first, "wb") as out:
        out.setparams(source.getparams())
        out.writeframes(source.readframes(round(ends[0] * RATE)))
    data = {"data": base64.b64encode(first.getvalue()).decode(), "format": "wav"}
    told = "Write down what is said, word for word. Answer with the text alone."
    content: Any = [{"type": "input_audio", "input_audio": data}, {"type": "text", "text": told}]
    chat = client.chat.completions.create(
        model="tiny", messages=[{"role": "user", "content": content}], temperature=0,
        max_completion_tokens=6,
    )  # fmt: skip
    assert blocks[0].split("\n", 2)[2] == (chat.choices[0].message.content or "").strip()
    assert hearing.idle_within(5)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"response_format": "diarized_json"}, "response_format"),
        ({"timestamp_granularities[]": "word"}, "timestamp_granularities"),
        ({"timestamp_granularities[]": "syllable"}, "timestamp_granularities"),
        ({"include[]": "logprobs"}, "include"),
        ({"language": "1"}, "language"),
        ({"temperature": "warm"}, "temperature"),
        ({"seed": "0.5"}, "seed"),
        ({"max_completion_tokens": "1.5"}, "max_completion_tokens"),
        ({"stream": "true", "response_format": "srt"}, "stream"),
        ({"chunking_strategy[type]": "server_vad"}, "chunking_strategy"),
    ],
    ids=lambda value: str(value)[:40],
)
def test_what_cannot_be_known_is_refused_by_name(
    hearing_url: str, fields: dict[str, str], param: str
) -> None:
    response = httpx.post(
        f"{hearing_url}/v1/audio/transcriptions",
        files={"file": ("a.wav", sound_file())},
        data=fields,
        timeout=60,
    )
    assert response.status_code == 400
    assert error(response)["param"] == param


def test_more_tokens_than_the_model_has_room_for_are_not_the_files_fault(
    client: openai.OpenAI,
) -> None:
    for stream in (False, True):
        with pytest.raises(openai.BadRequestError) as refused:
            list(ask(client, stream=stream, extra_body={"max_completion_tokens": "1000000000"}))
        assert refused.value.code == "context_length_exceeded"
        assert refused.value.param == "max_completion_tokens"


def test_a_worker_that_is_lost_in_a_stream_is_no_fault_of_the_server(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with fleet(with_template("voxtral")) as running:
        hear = route._hear

        async def cut(*given: Any, **named: Any) -> AsyncIterator[Any]:
            async for made in hear(*given, **named):
                yield made
                # Here, where nothing more is read meanwhile.
                with suppress(ProcessLookupError):
                    os.kill(running.processes[0].pid, signal.SIGKILL)

        monkeypatch.setattr(route, "_hear", cut)
        url = running.serve(router_queue_timeout=0.5)
        asked = {"stream": "true", "max_completion_tokens": "400"}
        with httpx.stream(
            "POST", f"{url}/v1/audio/transcriptions", data=asked, timeout=90,
            files={"file": ("a.wav", sound_file(20.0))},
        ) as response:  # fmt: skip
            events = [
                json.loads(line.removeprefix("data: "))
                for line in response.iter_lines()
                if line.startswith("data: {")
            ]
    assert events[-1]["error"]["type"] == "overloaded_error"


def test_a_file_that_is_no_sound_is_a_400(client: openai.OpenAI) -> None:
    for data in (b"no sound at all" * 9, sound_file()[:30]):
        with pytest.raises(openai.BadRequestError):
            ask(client, data)


def test_stereo_of_another_rate_is_heard(client: openai.OpenAI) -> None:
    heard = ask(client, sound_file(channels=2, rate=8000))
    assert heard.usage.output_tokens > 0


def test_sounds_heard_at_once_are_heard_as_alone_in_every_form(client: openai.OpenAI) -> None:
    sounds = [sound_file(seconds) for seconds in (0.9, SECONDS)]
    alone = [ask(client, sound).text for sound in sounds]
    with ThreadPoolExecutor(4) as pool:
        at_once = pool.map(lambda sound: ask(client, sound).text, sounds * 2)
        assert list(at_once) == alone * 2
    assert ask(client, sounds[1], response_format="verbose_json").text == alone[1]


def test_a_prompt_stands_before_what_is_said(client: openai.OpenAI) -> None:
    plain, told = ask(client), ask(client, prompt="Harbour, lantern, tide.")
    assert told.usage.input_tokens > plain.usage.input_tokens


def test_silence_is_heard(client: openai.OpenAI) -> None:
    loud = sound_file()
    assert ask(client, loud[:44] + bytes(len(loud) - 44)).usage.output_tokens > 0


def test_a_model_that_hears_nothing_says_so(plain_url: str) -> None:
    response = httpx.post(
        f"{plain_url}/v1/audio/transcriptions",
        files={"file": ("a.wav", sound_file())},
        timeout=60,
    )
    assert response.status_code == 400
    assert error(response)["param"] == "model"


@given(st.integers(0, 5000), st.integers(100, 1500), st.integers(0, 99))
@settings(max_examples=examples(100))
def test_pieces_are_all_of_the_sound_and_none_is_too_long(
    length: int, most: int, seed: int
) -> None:
    sound = np.random.default_rng(seed).normal(0, 1, length).astype(np.float32)
    pieces = quiet_cuts(sound, 1000, most)
    assert pieces[0][0] == 0
    assert pieces[-1][1] == length
    assert all(one[1] == other[0] for one, other in pairwise(pieces))
    assert all(0 < stop - start <= most for start, stop in pieces if length)
