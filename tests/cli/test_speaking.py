"""A model that speaks, as three stages: text and sound by the real client, streamed and whole."""

import base64
import io
import json
import re
import time
import urllib.request
import wave
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import openai
import pytest
import soundfile
import torch
import yaml
from safetensors.torch import load_file, save_file

from inlay.render import Renderer
from inlay_stages.engines.speech.loading import SPEAKERS, SYSTEM
from tests.cli.spoken import (
    BAD_PARTS,
    CHAT,
    MIXTURES,
    PICTURE,
    SEED,
    SPOKEN,
    SPOKEN_CHAT,
    VOICE,
    answered,
    directly,
    embedded,
    expected,
    samples_of,
    sent,
)
from tests.cli.test_models_in_a_row import documented
from tests.engine.torch.vision_reference import Item
from tests.omni_models import omni
from tests.parts import workers_of
from tests.serving import Served, free_port, serving

pytestmark = pytest.mark.slow

FURTHER = "Nobody"
ADMIN_PORT = free_port()
_PARTS = "bos_token", "cond", "ref_mel"


def with_a_further_voice(directory: Path) -> Path:
    """The model in a directory of its own, with a voice that others of its stages lack."""
    directory.mkdir()
    for file in omni().iterdir():
        if file.name != SPEAKERS:
            (directory / file.name).symlink_to(file)
    parts = load_file(omni() / SPEAKERS)
    more = {f"{FURTHER}.{part}": parts[f"{VOICE}.{part}"].clone() for part in _PARTS}
    save_file(parts | more, directory / SPEAKERS)
    return directory


def graph_of_the_page(directory: Path) -> dict[str, Any]:
    """The graph of the page, with a talker that is greedy, and lacks one of the voices."""
    graph = documented("omni.yaml")
    for stage in graph["stages"].values():
        stage["model"] = str(omni())
    graph["stages"]["vocoder"]["model"] = str(with_a_further_voice(directory))
    graph["stages"]["talker"] |= {"max_tokens": 40, "speech": {"temperature": 0}}
    graph["stages"]["vocoder"]["speech"] = {"chunk": 4}
    return graph


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    path = tmp_path_factory.mktemp("omni") / "omni.yaml"
    path.write_text(yaml.safe_dump(graph_of_the_page(path.parent / "vocoder")))
    flags = ["--enable-prompt-embeds", "--enable-mm-embeds", "--enable-sleep-mode"]
    flags += ["--enable-auto-tool-choice", "--tool-call-parser", "hermes"]
    with serving(path, "--dtype", "float32", *flags, "--admin-port", ADMIN_PORT) as found:
        yield found


@pytest.fixture(scope="module", params=["sound", "file"])
def at_once(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Served]:
    """The same, whose sound leaves the vocoder whole, or as a file."""
    path = tmp_path_factory.mktemp("omni") / "omni.yaml"
    graph = graph_of_the_page(path.parent / "vocoder")
    graph["outputs"]["audio"] = f"vocoder.{request.param}"
    if request.param == "sound":
        # Those of the other are made in pieces, and the file has them all.
        graph["stages"]["vocoder"]["speech"] = {"chunk": 48}
    path.write_text(yaml.safe_dump(graph))
    with serving(path, "--dtype", "float32") as found:
        yield found


def test_a_sound_that_leaves_its_stage_at_once_is_that_of_the_stream(
    served: Served, at_once: Served
) -> None:
    wanted = ask(served)
    answer = ask(at_once)
    found, whole_ = (
        samples_of(base64.b64decode(each.choices[0].message.audio.data))
        for each in (answer, wanted)
    )
    assert answer.choices[0].message.audio.transcript == wanted.choices[0].message.audio.transcript
    assert found.shape == whole_.shape
    # In pieces it is nearly the sound of all codes at once.
    assert np.abs(found.astype(int) - whole_).max() <= 8
    assert answer.usage.stages == wanted.usage.stages
    chunks = ask(at_once, stream=True)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    pieces = [delta.audio.data for delta in deltas if getattr(delta, "audio", None)]
    assert b"".join(map(base64.b64decode, filter(None, pieces))) == found.astype("<i2").tobytes()
    length = len(frames(speak(served).content))
    for kind, media_type in (("mp3", "audio/mpeg"), ("flac", "audio/flac"), ("wav", "audio/wav")):
        said = {"response_format": kind, "input": TEXT}
        file = speak(at_once, **said)
        assert file.response.headers["content-type"] == media_type
        samples, rate = soundfile.read(io.BytesIO(file.content), dtype="int16")
        assert rate == 24000
        # An MP3 that is sent while it is made is padded.
        assert len(samples) == length or (kind == "mp3" and len(samples) > length)
    nothing_is_kept(at_once)


def ask(served: Served, **more: Any) -> Any:
    fields: dict[str, Any] = SPOKEN_CHAT | more
    # Stages that are not ready yet are 503s.
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=60) as client:
        answer = client.chat.completions.create(**fields)
        return list(answer) if fields.get("stream") else answer


def test_a_whole_answer_is_the_transcript_and_the_sound_of_the_whole_model(served: Served) -> None:
    text, sound = expected()
    assert len(sound) > 400
    answer = ask(served)
    (choice,) = answer.choices
    audio = choice.message.audio
    assert choice.message.content is None
    assert (audio.transcript, choice.finish_reason) == (text, "length")
    assert audio.id.startswith("audio-")
    assert audio.expires_at == answer.created
    found = samples_of(base64.b64decode(audio.data))
    # Rounding to 16 bits, of states that a batch of another engine has computed.
    assert found.shape == sound.shape
    assert np.abs(found.astype(int) - sound).max() <= 8
    used = answer.usage.stages
    assert used["thinker"] == {
        "prompt_tokens": answer.usage.prompt_tokens,
        "completion_tokens": 14,
    }
    assert used["talker"]["prompt_tokens"] == 2 * (answer.usage.prompt_tokens + 13)
    assert used["vocoder"] == {
        "prompt_tokens": used["talker"]["completion_tokens"],
        "completion_tokens": len(sound),
    }
    for kind in "wav", "flac", "mp3":
        audio = {"voice": VOICE, "format": kind}
        file = base64.b64decode(ask(served, audio=audio).choices[0].message.audio.data)
        samples, rate = soundfile.read(io.BytesIO(file), dtype="int16")
        assert (rate, samples.shape) == (24000, found.shape)
        assert kind == "mp3" or np.array_equal(samples, found)


def test_a_stream_brings_the_same_piece_by_piece_and_ends_once(served: Served) -> None:
    whole_ = ask(served).choices[0].message.audio
    chunks = ask(served, stream=True, stream_options={"include_usage": True})
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    sent = [delta.audio for delta in deltas if getattr(delta, "audio", None)]
    assert "".join(one.transcript or "" for one in sent) == whole_.transcript
    pieces = [base64.b64decode(one.data) for one in sent if one.data]
    assert b"".join(pieces) == base64.b64decode(whole_.data)
    assert len({one.id for one in sent}) == 1
    assert sent[-1].expires_at == chunks[0].created
    for chunk in chunks:
        audio = [getattr(choice.delta, "audio", None) for choice in chunk.choices]
        wanted = [("audio", "omni/vocoder") if one and not one.transcript else ("text", "omni")
                  for one in audio]  # fmt: skip
        marks = [(chunk.model_extra["modality"], chunk.model_extra["stage"]) for _ in audio]
        assert marks == wanted
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [end for end in ends if end] == ["length"]
    assert [bool(chunk.usage) for chunk in chunks].count(True) == 1
    assert set(chunks[-1].usage.stages) == {"thinker", "talker", "vocoder"}


PARAMETERS: dict[str, Any] = {
    "type": "object",
    "properties": {"a": {"const": 1}},
    "required": ["a"],
    "additionalProperties": False,
}
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "count", "parameters": PARAMETERS},
}
NAMED = {"type": "function", "function": {"name": "count"}}


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(("choice", "end"), [(NAMED, "stop"), ("required", "tool_calls")])
def test_an_answer_that_calls_a_tool_is_the_call_without_a_sound(
    served: Served, choice: Any, end: str, stream: bool
) -> None:
    fields = {"tools": [TOOL], "tool_choice": choice, "parallel_tool_calls": False}
    answer = ask(served, **fields, max_tokens=90, stream=stream)
    events = answer if stream else [answer]
    choices = [choice for event in events for choice in event.choices]
    said = [choice.delta if stream else choice.message for choice in choices]
    calls = [call.function for one in said for call in one.tool_calls or ()]
    assert calls[0].name == "count"
    assert "".join(call.arguments for call in calls).replace(" ", "") == '{"a":1}'
    assert [one.finish_reason for one in choices if one.finish_reason] == [end]
    assert not any(getattr(one, "audio", None) or one.content for one in said)
    if not stream:
        assert set(answer.usage.model_extra.get("stages", ["thinker"])) == {"thinker"}
    nothing_is_kept(served)


def test_an_answer_that_might_have_called_a_tool_is_spoken_as_without(served: Served) -> None:
    wanted = ask(served).choices[0].message.audio
    message = ask(served, tools=[TOOL]).choices[0].message
    assert (message.audio.transcript, message.audio.data) == (wanted.transcript, wanted.data)
    chunks = ask(served, tools=[TOOL], stream=True)
    deltas = [choice.delta for chunk in chunks for choice in chunk.choices]
    sent = [delta.audio for delta in deltas if getattr(delta, "audio", None)]
    assert sent[0].transcript
    pieces = [base64.b64decode(one.data) for one in sent if one.data]
    assert b"".join(pieces) == base64.b64decode(wanted.data)


def test_a_spoken_answer_is_sent_back_as_it_came_and_is_its_transcript(served: Served) -> None:
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=60) as client:
        answer = client.chat.completions.create(**SPOKEN_CHAT)
        message = answer.choices[0].message
        assert message.audio is not None

        def ids(said: object) -> Any:
            turns: Any = [*CHAT, said, *CHAT]
            found: Any = client.chat.completions.create(
                model="omni", messages=turns, max_tokens=1, extra_body={"return_token_ids": True}
            )
            return found.prompt_token_ids

        as_text = ids({"role": "assistant", "content": message.audio.transcript})
        assert ids(message) == ids(message.model_dump()) == as_text
        with pytest.raises(openai.BadRequestError, match="no sound is kept by its id"):
            ids({"role": "assistant", "audio": {"id": message.audio.id}})


def test_a_prompt_that_is_embeddings_is_spoken_as_its_text(served: Served) -> None:
    text = CHAT[0]["content"]
    found, wanted = (
        ask(served, messages=[{"role": "user", "content": content}]).choices[0].message.audio
        for content in ([embedded(text)], text)
    )
    assert (found.transcript, found.data) == (wanted.transcript, wanted.data)


@pytest.mark.parametrize(
    ("name", "rows"), [*((name, False) for name in MIXTURES), ("image", True), ("all", True)]
)
def test_what_is_seen_and_heard_is_answered_as_by_the_whole_model(
    served: Served, name: str, rows: bool
) -> None:
    text, sound = answered(name)
    chat = [{"role": "user", "content": sent(MIXTURES[name], rows=rows)}]
    written = ask(served, messages=chat, modalities=["text"], audio=openai.NOT_GIVEN)
    assert written.choices[0].message.content == text
    # The prefix is cached from here on: the talker is told of it all the same.
    audio = ask(served, messages=chat).choices[0].message.audio
    assert audio.transcript == text
    found = samples_of(base64.b64decode(audio.data))
    assert found.shape == sound.shape
    assert np.abs(found.astype(int) - sound).max() <= 8


@pytest.mark.parametrize("name", BAD_PARTS)
def test_media_that_cannot_be_are_refused_by_their_place(served: Served, name: str) -> None:
    part, said = BAD_PARTS[name]
    chat = [{"role": "user", "content": [{"type": "text", "text": "a"}, part]}]
    with pytest.raises(openai.BadRequestError, match=re.escape(said)) as refused:
        ask(served, messages=chat)
    assert str(refused.value.param).startswith("messages[0].content[1]")
    nothing_is_kept(served)


def test_a_text_is_read_aloud_behind_a_picture_as_in_one_process(served: Served) -> None:
    how: list[str | Item] = ["as ", PICTURE, "says"]
    found = speak(served, instructions=sent(how), extra_body={"seed": SEED})
    assert np.array_equal(frames(found.content), directly(how, TEXT))


def trained_rows(directory: Path, count: int = 5) -> torch.Tensor:
    """Write a prompt that was trained, in PEFT's form; return its rows."""
    rows = 0.5 * torch.randn(count, 64, generator=torch.Generator().manual_seed(1))
    save_file({"prompt_embeddings": rows}, directory / "adapter_model.safetensors")
    config = {"peft_type": "PROMPT_TUNING", "task_type": "CAUSAL_LM", "num_virtual_tokens": count}
    (directory / "adapter_config.json").write_text(json.dumps(config | {"token_dim": 64}))
    return rows


def test_a_trained_prompt_stands_before_what_is_spoken(served: Served, tmp_path: Path) -> None:
    rows = trained_rows(tmp_path)
    adapter = {"lora_name": "tuned", "lora_path": str(tmp_path)}
    with httpx.Client(base_url=f"http://127.0.0.1:{ADMIN_PORT}/v1", timeout=60) as admin:
        assert admin.post("load_lora_adapter", json=adapter).status_code == 200
        answer = ask(served, model="tuned")
        assert admin.post("unload_lora_adapter", json={"lora_name": "tuned"}).is_success
    text, sound = expected(rows)
    assert text != expected()[0]
    audio = answer.choices[0].message.audio
    assert audio.transcript == text
    assert np.array_equal(samples_of(base64.b64decode(audio.data)), sound)
    read = len(Renderer.load(omni()).chat(CHAT)) + len(rows)
    assert answer.usage.prompt_tokens == answer.usage.stages["thinker"]["prompt_tokens"] == read


def test_an_answer_without_sound_is_a_chat_as_any(served: Served) -> None:
    text, _ = expected()
    answer = ask(served, modalities=["text"], audio=openai.NOT_GIVEN)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.audio is None


@pytest.mark.parametrize("stage", ["omni", "omni/talker", "omni/vocoder"])
def test_a_stage_sleeps_alone_and_wakes_with_the_same_sound(served: Served, stage: str) -> None:
    wanted = speak(served).content
    with httpx.Client(base_url=f"http://127.0.0.1:{ADMIN_PORT}", timeout=60) as admin:
        asked = {"model": stage}
        others = {"model": "omni/talker" if stage == "omni/vocoder" else "omni/vocoder"}
        assert admin.post("/sleep", params=asked | {"level": "2"}).is_success
        try:
            assert admin.get("/is_sleeping", params=asked).json()["is_sleeping"]
            assert not admin.get("/is_sleeping", params=others).json()["is_sleeping"]
            for route, fields in (("audio/speech", TEXT_SPOKEN), ("chat/completions", SPOKEN_CHAT)):
                answer = httpx.post(f"{served.v1}/{route}", json=fields, timeout=60)
                assert answer.status_code == 503, answer.text
                assert f"The model `{stage}` is asleep" in answer.json()["error"]["message"]
                assert answer.headers["retry-after"]
            nothing_is_kept(served)
        finally:
            assert admin.post("/wake_up", params=asked).is_success
    assert speak(served).content == wanted


def counted(served: Served, name: str) -> float:
    """Sum of a metric over all workers."""
    with urllib.request.urlopen(served.url + "/metrics") as found:
        page = found.read().decode()
    numbers = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.M)
    assert numbers
    return sum(map(float, numbers))


def nothing_is_kept(served: Served) -> None:
    """Wait until no stage has a request, or payloads of one."""
    names = (
        "inlay:held_payloads",
        "inlay:held_bytes",
        "vllm:num_requests_running",
        "vllm:num_requests_waiting",
    )
    while any(counted(served, name) for name in names):
        time.sleep(0.1)


def test_clients_that_leave_free_what_every_stage_and_the_frontend_keep(served: Served) -> None:
    chat: dict[str, Any] = {"messages": CHAT, "modalities": ["text", "audio"], "max_tokens": 400}
    chat |= {"audio": {"voice": VOICE, "format": "pcm16"}, "logit_bias": {"2": -100}}
    speech = {"input": TEXT, "voice": VOICE, "response_format": "pcm"}
    asked = [
        ("chat/completions", chat | {"stream": True}),
        ("audio/speech", speech),
        ("audio/speech", speech | {"stream_format": "sse"}),
    ]

    def leave(number: int) -> None:
        route, fields = asked[number % 3]
        with httpx.stream(
            "POST", f"{served.v1}/{route}", json={"model": "omni"} | fields, timeout=60
        ) as answer:
            pieces = answer.iter_bytes()
            for _ in range(number % 4):
                next(pieces)

    with ThreadPoolExecutor(6) as pool:
        # Each way, after each number of pieces.
        list(pool.map(leave, range(12)))
    nothing_is_kept(served)


def test_a_stage_that_is_killed_ends_what_it_speaks_and_leaves_nothing(served: Served) -> None:
    wanted = ask(served).choices[0].message.audio.data
    endless = {"model": "omni", "messages": CHAT, "modalities": ["text", "audio"], "stream": True}
    endless |= {"audio": {"voice": VOICE, "format": "pcm16"}, "logit_bias": {"2": -100}}
    workers = workers_of(served.process.pid)
    assert len(workers) == 3
    for worker in workers:
        with httpx.stream(
            "POST", f"{served.v1}/chat/completions", json=endless | {"max_tokens": 300}, timeout=60
        ) as answer:
            lines = answer.iter_lines()
            while '"modality":"audio"' not in next(lines):
                pass
            worker.kill()
            rest = [line for line in lines if line]
        ends = [line for line in rest if '"finish_reason":"' in line or '"error"' in line]
        assert len(ends) == 1
        # Once it is back.
        assert ask(served).choices[0].message.audio.data == wanted
        nothing_is_kept(served)


@pytest.mark.parametrize("stream", [False, True])
def test_a_sound_that_fails_ends_the_text_that_waits_for_its_reader(
    served: Served, stream: bool
) -> None:
    audio = {"voice": FURTHER, "format": "pcm16"}
    # More than the window between the stages: the thinker waits until all of it is heard.
    longest: dict[str, Any] = {"max_tokens": 400, "logit_bias": {"2": -100}, "audio": audio}
    with pytest.raises(openai.APIError, match="voice is 'Nobody'; allowed: Chelsie, Ethan"):
        ask(served, stream=stream, **longest)
    nothing_is_kept(served)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"audio": {"voice": "alloy", "format": "wav"}}, "audio.voice", "allowed: Chelsie, Ethan"),
        (
            {"audio": {"voice": VOICE, "format": "aac"}},
            "audio.format",
            "allowed: mp3, opus, flac, wav, pcm16",
        ),
        (
            {"audio": {"voice": VOICE, "format": "wav"}, "stream": True},
            "audio.format",
            "allowed in a stream: pcm16",
        ),
        ({"audio": openai.NOT_GIVEN}, "audio", "audio is missing"),
        ({"modalities": ["text"]}, "audio", "ask for it with modalities"),
        ({"modalities": ["audio"]}, "modalities", "allowed"),
        ({"modalities": ["text", "image"]}, "modalities", "text alone"),
        ({"n": 2}, "n", "an answer with sound is one"),
        ({"logprobs": True}, "logprobs", "does not go with audio"),
        ({"stop": ["."]}, "stop", "does not go with audio"),
        (
            {"extra_body": {"prompt_logprobs": 0}},
            "prompt_logprobs",
            "prompt_logprobs does not go with audio",
        ),
        (
            {"extra_body": {"mm_processor_kwargs": {"use_audio_in_video": True}}},
            "mm_processor_kwargs",
            "videos are frames (use_audio_in_video)",
        ),
        (
            {"messages": [{"role": "user", "content": "a" * 498}], "max_tokens": 1},
            "messages",
            "the prompt has 510 positions; `omni/talker` speaks behind at most 509",
        ),
    ],
)
def test_what_cannot_be_is_refused(
    served: Served, fields: dict[str, Any], param: str, said: str
) -> None:
    with pytest.raises(openai.BadRequestError, match=re.escape(said)) as refused:
        ask(served, **fields)
    assert refused.value.param == param


TEXT, SLOWLY = "one two three four", "slowly"
TEXT_SPOKEN = SPOKEN | {"input": TEXT}
SHORT = {"seed": SEED, "max_new_tokens": 16}
"""Ends a sound early: making it takes most of the time."""


def speak(served: Served, **more: Any) -> Any:
    fields = {"extra_body": SHORT} | TEXT_SPOKEN | more
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=60) as client:
        return client.with_options(max_retries=0).audio.speech.create(**fields)


def frames(file: bytes) -> np.ndarray:
    with wave.open(io.BytesIO(file)) as reader:
        assert (reader.getnchannels(), reader.getframerate()) == (1, 24000)
        return samples_of(reader.readframes(reader.getnframes()))


@pytest.mark.parametrize(("instructions", "text"), [(None, TEXT), (SLOWLY, "Say it once more.")])
def test_a_text_is_spoken_as_the_same_parts_speak_it_in_one_process(
    served: Served, instructions: str | None, text: str
) -> None:
    sound = directly(instructions or "Read the text aloud.", text)
    assert len(sound) > 400
    more = {} if instructions is None else {"instructions": instructions}
    found = speak(served, input=text, extra_body={"seed": SEED}, **more)
    assert found.response.headers["content-type"] == "audio/wav"
    assert found.response.headers["content-length"] == str(44 + 2 * len(sound))
    assert np.array_equal(frames(found.content), sound)


def test_a_text_comes_piece_by_piece(served: Served) -> None:
    whole_ = frames(speak(served).content)
    asked: tuple[dict[str, Any], ...] = (
        {"response_format": "pcm"},
        {"response_format": "wav", "stream_format": "audio"},
    )
    for how in asked:
        kind, fields = how["response_format"], TEXT_SPOKEN | {"extra_body": SHORT} | how
        with (
            openai.OpenAI(base_url=served.v1, api_key="none") as client,
            client.audio.speech.with_streaming_response.create(**fields) as answer,
        ):
            assert answer.headers["content-type"] == f"audio/{kind}"
            assert "content-length" not in answer.headers
            file = b"".join(answer.iter_bytes())
        header = file[: 0 if kind == "pcm" else 44]
        assert np.array_equal(samples_of(file[len(header) :]), whole_)
        assert header[4:8] == header[40:44] == (b"" if kind == "pcm" else b"\xff" * 4)


@pytest.mark.parametrize(
    ("kind", "media", "magic"),
    [
        (None, "audio/mpeg", b"\xff\xf3"),
        ("mp3", "audio/mpeg", b"\xff\xf3"),
        ("opus", "audio/ogg", b"OggS"),
        ("flac", "audio/flac", b"fLaC"),
    ],
)
def test_a_text_is_compressed_as_openais_client_asks_for_it(
    served: Served, kind: str | None, media: str, magic: bytes
) -> None:
    samples = 20 * SHORT["max_new_tokens"]
    # Its default is the server's.
    asked = openai.NOT_GIVEN if kind is None else kind
    sent = speak(served, response_format=asked)
    whole_ = speak(served, response_format=asked, extra_body=SHORT | {"stream": False})
    assert sent.response.headers["content-type"] == media
    assert ("content-length" in sent.response.headers) is (kind == "flac")
    assert sent.content.startswith(magic)
    assert len(soundfile.read(io.BytesIO(sent.content))[0]) >= samples
    found, rate = soundfile.read(io.BytesIO(whole_.content), dtype="int16")
    assert (len(found), rate) == (samples, 24000)
    if kind == "flac":
        assert np.array_equal(found, frames(speak(served).content))
    events = (
        speak(served, response_format=asked, stream_format="sse").content.decode().split("\n\n")
    )
    pieces = [json.loads(each.removeprefix("data: ")).get("audio", "") for each in events if each]
    assert b"".join(map(base64.b64decode, pieces)).startswith(magic)


def test_a_text_comes_as_events_and_then_usage(served: Served) -> None:
    answer = speak(served, response_format="pcm", stream_format="sse")
    lines = answer.content.decode().removesuffix("\n\n").split("\n\n")
    events = [json.loads(line.removeprefix("data: ")) for line in lines]
    assert [event["type"] for event in events[:-1]] == ["speech.audio.delta"] * (len(events) - 1)
    sound = samples_of(b"".join(base64.b64decode(event["audio"]) for event in events[:-1]))
    end = events[-1]
    codes = SHORT["max_new_tokens"]
    assert (end["type"], end["finish_reason"]) == ("speech.audio.done", "length")
    assert len(sound) == 20 * codes
    renderer = Renderer.load(omni())
    messages = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": "Read the text aloud."},
    ]
    read = len(renderer.chat(messages)) + len(renderer.encode(TEXT, add_special_tokens=False))
    used = end["usage"]
    stages = used.pop("stages")
    assert used == {"input_tokens": read, "output_tokens": codes, "total_tokens": read + codes}
    assert stages["thinker"] == {"input_tokens": read, "output_tokens": 0}
    assert stages["talker"] == {"input_tokens": 2 * read, "output_tokens": codes}
    assert stages["vocoder"] == {"input_tokens": codes, "output_tokens": len(sound)}


def test_embeddings_are_spoken_as_their_text(served: Served) -> None:
    part = embedded
    # A text beside embeddings is tokenized on its own.
    wanted = frames(
        speak(served, input=[{"type": "text", "text": "one two"}, part(" three")]).content
    )
    for text in (
        [part("one two"), part(" three")],
        [part("one two"), {"type": "text", "text": " three"}],
    ):
        assert np.array_equal(frames(speak(served, input=text).content), wanted)
    how = [part(SLOWLY)]
    found = frames(speak(served, input="a", instructions=how).content)
    assert np.array_equal(found, frames(speak(served, input="a", instructions=SLOWLY).content))


def test_a_sound_that_fails_before_its_first_piece_has_the_status_of_its_error(
    served: Served,
) -> None:
    fields = TEXT_SPOKEN | {"voice": FURTHER, "response_format": "pcm"}
    answer = httpx.post(f"{served.v1}/audio/speech", json=fields, timeout=60)
    assert answer.status_code == 400
    assert "allowed: Chelsie, Ethan" in answer.json()["error"]["message"]
    nothing_is_kept(served)


@pytest.mark.parametrize(
    ("fields", "param", "said"),
    [
        ({"input": ""}, "input", "nothing to speak"),
        ({"input": []}, "input", "nothing to speak"),
        ({"input": None}, "input", "expected `str | array`, got `null`"),
        ({"input": "a" * 60}, "input", "the talker makes at most 40 here"),
        ({"input": "a" * 600}, "input", "512"),
        (
            {"input": [{"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}]},
            "input[0].type",
            "can be spoken",
        ),
        ({"input": [{"type": "refusal", "refusal": "x"}]}, "input[0].type", "can be spoken"),
        ({"input": [{"text": "x"}]}, "input[0].type", "can be spoken"),
        ({"instructions": "a" * 500}, "instructions", "speaks behind at most 509"),
        ({"voice": "alloy"}, "voice", "allowed: Chelsie, Ethan"),
        ({"voice": {"id": "alloy"}}, "voice.id", "allowed: Chelsie, Ethan"),
        ({"response_format": "aac"}, "response_format", "allowed: mp3, opus, flac, wav, pcm"),
        ({"stream_format": "raw"}, "stream_format", "raw"),
        ({"stream": False, "stream_format": "sse"}, "stream", "say one of them"),
        ({"speed": 1.5}, "speed", "speaks at its own"),
        ({"ref_audio": "https://example.com/a.wav"}, "ref_audio", "none is cloned"),
        ({"max_new_tokens": 0}, "max_new_tokens", ">= 1"),
        ({"priority": 3}, "priority", "first come, first"),
        ({"model": "omni/talker"}, "model", "does not speak"),
    ],
)
def test_a_text_that_cannot_be_spoken_so_is_refused(
    served: Served, fields: dict[str, Any], param: str, said: str
) -> None:
    answer = httpx.post(f"{served.v1}/audio/speech", json=TEXT_SPOKEN | fields, timeout=60)
    assert answer.status_code == 400, answer.text
    found = answer.json()["error"]
    assert found["param"] == param
    assert said in found["message"]


def test_what_asks_for_nothing_else_is_taken(served: Served) -> None:
    fields: dict[str, Any] = SHORT | {
        "speed": 1.0,
        "sample_rate": 24000,
        "voice": {"id": VOICE},
        "stream": False,
    }
    fields = TEXT_SPOKEN | {"response_format": "pcm", "model": None} | fields
    answer = httpx.post(f"{served.v1}/audio/speech", json=fields, timeout=60)
    assert int(answer.headers["content-length"]) == 2 * 20 * SHORT["max_new_tokens"]


def test_a_chat_whose_sound_is_cut_off_ends_as_one_whose_text_is(served: Served) -> None:
    asked: dict[str, Any] = {"modalities": ["text"], "audio": openai.NOT_GIVEN}
    ids = ask(served, extra_body={"return_token_ids": True}, **asked).choices[0].token_ids
    for stream in (False, True):
        # The text ends by itself, before its sound.
        found = ask(served, stream=stream, extra_body={"stop_token_ids": [ids[5]]})
        choices = [one for each in (found if stream else [found]) for one in each.choices]
        assert [one.finish_reason for one in choices if one.finish_reason] == ["length"]
