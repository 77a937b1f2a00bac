"""A model that speaks, as three stages: text and sound by the real client, streamed and whole."""

import base64
import io
import re
import time
import urllib.request
import wave
from array import array
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from inlay.engine.speech.loading import SPEAKERS
from inlay.render import Renderer
from inlay.speech import Speech
from tests.cli.test_models_in_a_row import documented
from tests.engine.speech.test_speech import codes_of, sounds, states, talker
from tests.omni_models import omni, whole
from tests.serving import Served, serving

pytestmark = pytest.mark.slow

CHAT: list[dict[str, Any]] = [{"role": "user", "content": "what is the capital of the island?"}]
VOICE, FURTHER = "Ethan", "Nobody"
_PARTS = "bos_token", "cond", "ref_mel"
SEED = 5


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
    with serving(path, "--dtype", "float32", "--enable-prompt-embeds") as found:
        yield found


def ask(served: Served, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "messages": CHAT,
        "modalities": ["text", "audio"],
        "audio": {"voice": VOICE, "format": "pcm16"},
        "temperature": 0,
        "max_tokens": 14,
        "seed": SEED,
    } | more
    # Stages that are not ready yet are 503s.
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=60) as client:
        answer = client.chat.completions.create(model="omni", **fields)
        return list(answer) if fields.get("stream") else answer


def expected() -> tuple[str, np.ndarray]:
    """Text and sound of transformers' thinker, and of the talker and the vocoder alone."""
    renderer = Renderer.load(omni())
    ids = list(renderer.chat(CHAT).token_ids())
    model = whole().thinker
    with torch.no_grad():
        found = model.generate(
            torch.tensor([ids]),
            max_new_tokens=14,
            do_sample=False,
            eos_token_id=2,
            output_hidden_states=True,
            return_dict_in_generate=True,
        )
    talk = talker().begin(Speech(voice=VOICE, prompt_tokens=len(ids), temperature=0, max_tokens=40))
    pieces = [
        talk.advance([states(0, each[0][0]), states(3, each[-1][0])], ended=False)
        for each in found.hidden_states
    ]
    while not pieces[-1].done:
        pieces.append(talk.advance([], ended=True))
    sound = torch.cat(list(sounds(codes_of(pieces), 4, SEED)))
    said = found.sequences[0, len(ids) :].tolist()
    text = renderer.decode(said, skip_special_tokens=True)
    return text, np.round(32767 * sound.double().numpy()).astype(np.int16)


def samples_of(data: bytes) -> np.ndarray:
    return np.array(array("h", data), np.int16)


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
    file = base64.b64decode(
        ask(served, audio={"voice": VOICE, "format": "wav"}).choices[0].message.audio.data
    )
    with wave.open(io.BytesIO(file)) as reader:
        assert (reader.getnchannels(), reader.getframerate()) == (1, 24000)
        assert np.array_equal(samples_of(reader.readframes(reader.getnframes())), found)


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
    ends = [choice.finish_reason for chunk in chunks for choice in chunk.choices]
    assert [end for end in ends if end] == ["length"]
    assert [bool(chunk.usage) for chunk in chunks].count(True) == 1
    assert set(chunks[-1].usage.stages) == {"thinker", "talker", "vocoder"}


def test_a_prompt_that_is_embeddings_is_spoken_as_its_text(served: Served) -> None:
    text = CHAT[0]["content"]
    ids = Renderer.load(omni()).encode(text, add_special_tokens=False)
    rows = whole().thinker.get_input_embeddings()(torch.tensor(ids)).detach()
    file = io.BytesIO()
    torch.save(rows, file)
    part = {"type": "prompt_embeds", "data": base64.b64encode(file.getvalue()).decode()}
    found, wanted = (
        ask(served, messages=[{"role": "user", "content": content}]).choices[0].message.audio
        for content in ([part], text)
    )
    assert (found.transcript, found.data) == (wanted.transcript, wanted.data)


def test_an_answer_without_sound_is_a_chat_as_any(served: Served) -> None:
    text, _ = expected()
    answer = ask(served, modalities=["text"], audio=openai.NOT_GIVEN)
    assert answer.choices[0].message.content == text
    assert answer.choices[0].message.audio is None


def counted(served: Served, name: str) -> float:
    """Sum of a metric over all workers."""
    with urllib.request.urlopen(served.url + "/metrics") as found:
        page = found.read().decode()
    numbers = re.findall(rf"^{name}(?:{{[^}}]*}})? (\S+)$", page, re.M)
    assert numbers
    return sum(map(float, numbers))


def nothing_is_kept(served: Served) -> None:
    """Wait until no stage has a request, or payloads of one."""
    names = ("inlay:held_payloads", "vllm:num_requests_running", "vllm:num_requests_waiting")
    while any(counted(served, name) for name in names):
        time.sleep(0.1)


@pytest.mark.parametrize("events", [1, 4, 9])
def test_a_client_that_leaves_frees_what_every_stage_keeps(served: Served, events: int) -> None:
    fields: dict[str, Any] = {"messages": CHAT, "modalities": ["text", "audio"], "max_tokens": 400}
    fields |= {"audio": {"voice": VOICE, "format": "pcm16"}, "logit_bias": {"2": -100}}
    with openai.OpenAI(base_url=served.v1, api_key="none", max_retries=60) as client:
        stream = client.chat.completions.create(model="omni", stream=True, **fields)
        for _ in range(events):
            next(stream)
        stream.close()
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
        ({"audio": {"voice": VOICE, "format": "mp3"}}, "audio.format", "allowed: wav, pcm16"),
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
