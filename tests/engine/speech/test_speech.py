"""Talker and vocoder give what transformers' whole model gives in one piece."""

import re
import textwrap
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file
from torch import Tensor

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.media.positions import media_runs
from inlay.messages.prompt import Buffer
from inlay.messages.request import Input, Payload
from inlay_stages.engines.speech.job import TurnPayloads, tensor_of
from inlay_stages.engines.speech.loading import load
from inlay_stages.engines.speech.talker import Talk, Talker
from inlay_stages.engines.speech.vocoder import Vocoder, VocoderState
from inlay_stages.params import Speech
from tests.engine.torch.vision_reference import (
    Clip,
    Parts,
    Picture,
    Sound,
    ids_of,
    omni_inputs,
    prompt_of,
    surrounded,
)
from tests.omni_models import CODES, MEDIA, SPEAKERS, omni, whole

PROMPTS = ((5, 17, 40, 41, 99, 123, 7), (300, 12, 6), tuple(range(150, 180)), (8, 77))
MAX_CODES = 30
CHUNK_ERROR = 1e-3
"""Of sound in chunks, as a part of its root mean square."""


@cache
def part(name: str) -> Any:
    settings = EngineSettings.of(model=str(omni()), engine="speech", part=name, device="cpu")
    return load(settings).model


def talker() -> Talker:
    found: Talker = part("talker")
    return found


def vocoder() -> Vocoder:
    found: Vocoder = part("token2wav")
    return found


@cache
def reference(prompt: tuple[int, ...], voice: str) -> tuple[list[int], list[Tensor], Tensor]:
    """Text, what the thinker's first layer reads and its last gives at each step, and codes."""
    return answer_to(list(prompt), voice)


def answer_to(
    prompt: list[int],
    voice: str,
    media: Mapping[str, Tensor] | None = None,
    max_codes: int = MAX_CODES,
) -> tuple[list[int], list[Tensor], Tensor]:
    """As `reference`, of a prompt in which media have the ids of their kinds."""
    model = whole()
    steps: list[Tensor] = []
    codes: list[Tensor] = []
    think = model.thinker.generate

    def remembered(*args: Any, **kwargs: Any) -> Any:
        found = think(*args, **kwargs)
        steps.extend(torch.stack([each[0][0], each[-1][0]]) for each in found.hidden_states)
        return found

    def heard(code: Tensor, **_: Any) -> Tensor:
        codes.append(code)
        return torch.zeros(1)

    with (
        mock.patch.object(model.thinker, "generate", remembered),
        # This release gives the talker the pixels too, which it does not know, and then refuses.
        mock.patch.object(model.talker, "_validate_model_kwargs"),
        mock.patch.object(model.token2wav, "forward", heard),
    ):
        text, _ = model.generate(
            # A second prompt, with padding: without any, this release of transformers drops the mask,
            # and then leaves out the codec's own two tokens before the first code.
            torch.tensor([prompt, prompt]),
            attention_mask=torch.tensor([[1] * len(prompt), [0] + [1] * (len(prompt) - 1)]),
            **{name: torch.cat([value, value]) for name, value in (media or {}).items()},
            speaker=voice,
            thinker_do_sample=False,
            talker_do_sample=False,
            thinker_max_new_tokens=14,
            talker_max_new_tokens=max_codes,
            talker_eos_token_id=sorted(talker().ends),
            thinker_eos_token_id=2,
        )
    said = text[0, len(prompt) :].tolist()
    if 2 in said:
        said = said[: said.index(2) + 1]
    return said, steps[: len(said)], codes[0][0]


def states(layer: int, rows: Tensor) -> Input:
    data = rows.contiguous().numpy().tobytes()
    return Input(f"states.{layer}", Payload("", "float32", tuple(rows.shape), Buffer(data)))


def codes_of(pieces: list[TurnPayloads]) -> list[int]:
    payloads = [payload for piece in pieces for payload in piece.payloads]
    return [code for payload in payloads for code in tensor_of(payload).tolist()]


def spoken(talk: Talk, steps: list[Tensor]) -> list[int]:
    pieces: list[TurnPayloads] = []
    for step in steps:
        pieces.append(talk.advance([states(0, step[0]), states(3, step[1])], ended=False))
        if pieces[-1].done:
            break
    while not pieces[-1].done:
        pieces.append(talk.advance([], ended=True))
    return codes_of(pieces)


@pytest.mark.parametrize("voice", SPEAKERS)
@pytest.mark.parametrize("prompt", PROMPTS, ids=len)
def test_codes_are_those_of_the_whole_model(prompt: tuple[int, ...], voice: str) -> None:
    text, steps, expected = reference(prompt, voice)
    assert len(steps) == len(text)
    params = Speech(voice=voice, prompt_tokens=len(prompt), temperature=0, max_tokens=MAX_CODES)
    assert spoken(talker().begin(params), steps) == expected.tolist()
    # A prompt that comes in parts, and a text that comes at once, change nothing.
    first, *others = steps
    parts = [*torch.split(first, 2, dim=1), *([torch.cat(others, dim=1)] if others else ())]
    assert spoken(talker().begin(params), parts) == expected.tolist()


PICTURE, SOUND, CLIP = Picture(1, 40, 56), Sound(1, 18_003), Clip(2, 4, 70, 33, fps=1.5)
MEDIA_PROMPTS: dict[str, Parts] = {
    "image": [[5, 17, 40], PICTURE, [99, 123]],
    "sound": [[5, 17, 40], SOUND, [99, 123]],
    "video": [[5, 17, 40], CLIP, [99, 123]],
    "all": [[5], PICTURE, [17, 40], CLIP, [41], SOUND, [9], Picture(2, 30, 20), [99, 123]],
}


@pytest.mark.parametrize("name", MEDIA_PROMPTS)
def test_codes_behind_media_are_those_of_the_whole_model(name: str) -> None:
    case, parts = "qwen2_5_omni", surrounded(MEDIA_PROMPTS[name])
    prompt = prompt_of(case, parts)
    inputs = omni_inputs(case, [part for part in parts if not isinstance(part, list)])
    ids = ids_of(prompt, rows=MEDIA)
    _, steps, expected = answer_to(ids, "Ethan", inputs)
    params = Speech(
        voice="Ethan",
        prompt_tokens=len(prompt),
        media=media_runs(prompt),
        temperature=0,
        max_tokens=MAX_CODES,
    )
    assert spoken(talker().begin(params), steps) == expected.tolist()
    # What is no rows of media to the talker, or stands elsewhere, is heard as something else.
    for other in ((), tuple((start, replace(run, grid=None)) for start, run in params.media)):
        if name != "sound" or not other:
            wrong = replace(params, media=other)
            assert spoken(talker().begin(wrong), steps) != expected.tolist()


def test_references_are_long_enough_and_unlike() -> None:
    found = {
        tuple(reference(prompt, voice)[2].tolist()) for prompt in PROMPTS for voice in SPEAKERS
    }
    assert len(found) == len(PROMPTS) * len(SPEAKERS)
    assert max(map(len, found)) == MAX_CODES


def test_what_is_drawn_depends_on_the_seed_alone() -> None:
    _, steps, _ = reference(PROMPTS[0], "Ethan")
    drawn = [
        spoken(
            talker().begin(
                Speech(voice="Ethan", prompt_tokens=len(PROMPTS[0]), seed=seed, max_tokens=30)
            ),
            steps,
        )
        for seed in (1, 1, 2)
    ]
    assert drawn[0] == drawn[1] != drawn[2]


def test_a_thinker_that_says_nothing_is_silence() -> None:
    talk = talker().begin(Speech(voice="Ethan", prompt_tokens=3))
    rows = torch.zeros(3, 64)
    assert talk.advance([states(0, rows), states(3, rows)], ended=False) == TurnPayloads(
        (), done=False
    )
    assert talk.advance([], ended=True) == TurnPayloads((), done=True)


def sounds(codes: list[int], chunk: int, seed: int = 7, at_once: int = 1) -> Iterator[Tensor]:
    """The pieces of sound of codes that come one by one."""
    state = vocoder().begin(Speech(voice="Ethan", chunk=chunk, seed=seed))
    for start in range(0, len(codes), at_once):
        own = torch.tensor(codes[start : start + at_once], dtype=torch.int32)
        data = Buffer(own.numpy().tobytes())
        piece = state.advance(
            [Input("codes", Payload("", "int32", (len(own),), data))], ended=False
        )
        yield from map(tensor_of, piece.payloads)
    while True:
        piece = state.advance([], ended=True)
        yield from map(tensor_of, piece.payloads)
        if piece.done:
            return


def some_codes(count: int) -> list[int]:
    drawn = torch.randint(CODES, (count,), generator=torch.Generator().manual_seed(3))
    found: list[int] = drawn.tolist()
    return found


@pytest.mark.parametrize("count", [1, 7, 40])
def test_the_sound_of_all_codes_is_that_of_the_whole_model(count: int) -> None:
    codes = some_codes(count)
    model = whole()
    voice = model.speaker_map["Ethan"]
    noise = vocoder().noise(7, 0, count)
    with mock.patch.object(torch, "randn", return_value=noise), torch.no_grad():
        expected = model.token2wav(
            torch.tensor([codes]), conditioning=voice["cond"], reference_mel=voice["ref_mel"]
        )
    (found,) = sounds(codes, 0)
    assert torch.equal(found, expected.reshape(-1))


@pytest.mark.thorough
@pytest.mark.parametrize("chunk", [8, 20])
def test_sound_in_chunks_is_nearly_that_of_all_codes(chunk: int) -> None:
    codes = some_codes(50)
    (expected,) = sounds(codes, 0)
    pieces = list(sounds(codes, chunk))
    assert len(pieces) > 2
    found = torch.cat(pieces)
    assert found.shape == expected.shape
    error = (found - expected).pow(2).mean().sqrt() / expected.pow(2).mean().sqrt()
    assert expected.abs().max() < 1
    assert error < CHUNK_ERROR
    assert torch.equal(found, torch.cat(list(sounds(codes, chunk, at_once=9))))


def test_sound_that_is_not_finite_is_an_error() -> None:
    (voice, *_) = vocoder()._voices.values()
    nothing = torch.full_like(voice.condition, torch.nan)
    state = VocoderState(vocoder(), Speech(voice="Ethan"), voice._replace(condition=nothing))
    data = Buffer(torch.tensor(some_codes(4), dtype=torch.int32).numpy().tobytes())
    codes = Input("codes", Payload("codes", "int32", (4,), data))
    with pytest.raises(EngineError, match="sound is not finite"):
        state.advance([codes], ended=True)


def test_the_sound_of_a_spectrum_does_not_depend_on_where_it_is_cut() -> None:
    own = vocoder()
    spectrum = torch.randn(1, 8, 300, generator=torch.Generator().manual_seed(5))
    expected = own.sound(spectrum)
    start, stop, reach = 120, 160, own.reach
    found = own.sound(spectrum[:, :, start - reach : stop + reach])
    found = found[reach * own.hop : (reach + stop - start) * own.hop]
    whole_ = expected[start * own.hop : stop * own.hop]
    assert (found - whole_).abs().max() < 1e-5 * expected.abs().max()


def test_the_page_says_how_voices_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    page = Path(__file__).parents[3] / "docs" / "pipelines.md"
    found = re.search(r"^    import torch\n((?:    .*\n|\n)+)", page.read_text(), re.M)
    assert found is not None
    (tmp_path / "Qwen2.5-Omni-7B").mkdir()
    (tmp_path / "Qwen2.5-Omni-7B" / "spk_dict.pt").symlink_to(omni() / "spk_dict.pt")
    monkeypatch.chdir(tmp_path)
    exec(textwrap.dedent(found[0]), {})
    written = load_file("Qwen2.5-Omni-7B/speakers.safetensors")
    known = load_file(omni() / "speakers.safetensors")
    assert written.keys() == known.keys()
    assert all(torch.equal(written[name], known[name]) for name in known)


def test_files_that_are_no_such_model_are_refused(tmp_path: Path) -> None:
    settings = {"model": str(omni()), "engine": "speech", "device": "cpu"}
    with pytest.raises(InvalidRequestError, match="not a whole model"):
        load(EngineSettings.of(**settings))
    for file in omni().iterdir():
        if file.name != "speakers.safetensors":
            (tmp_path / file.name).symlink_to(file)
    settings |= {"model": str(tmp_path), "part": "talker"}
    with pytest.raises(InvalidRequestError, match=r"speakers.safetensors cannot be read.*docs/"):
        load(EngineSettings.of(**settings))
