"""Models with images through the whole core: logits and tokens of `transformers.generate`.

In chunks that cut images, from the prefix cache, beside neighbours, preempted and resumed.
"""

from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor as Values
from transformers import AutoConfig

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch import batch
from inlay.engine.torch.attention import choice, gathered
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.decode_graphs import Capture
from inlay.engine.torch.media.readers import Inputs, readers_of
from inlay.engine.torch.media.tower import ROWS, Tower, as_rows
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.needs import Need
from inlay.engine.torch.step import Core
from inlay.engine.torch.weights.checkpoint import parsed_config
from inlay.engine.torch.weights.media_families import MEDIA_FAMILIES
from inlay.media.embeds import embeds_segments
from inlay.media.spec import layout
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Media, Prompt, Rows, Segment, Tokens
from inlay.messages.request import Output, Request, Sampling
from inlay.tensors import Tensor
from tests.audio_models import AUDIO_FAMILIES
from tests.engine.torch.vision_reference import (
    OMNI_CASES,
    VIDEO_CASES,
    Clip,
    Item,
    Parts,
    Picture,
    Sound,
    directory_of,
    generated,
    prompt_of,
    segments_of,
    spec,
    spectra,
    surrounded,
)
from tests.vision_models import FAMILIES

NEW = 7
"""Tokens each prompt is continued by."""

ONE, TWO = Picture(1, 40, 56), Picture(2, 70, 33)
SOUNDS = Sound(1, 18_003), Sound(2, 9_000)
CLIPS = Clip(1, 5, 40, 56), Clip(2, 4, 70, 33, fps=1.5)

CASES = (*FAMILIES, *AUDIO_FAMILIES, *VIDEO_CASES, *OMNI_CASES)


def items(case: str) -> tuple[Item, Item]:
    """The two items that a case's prompts hold."""
    if case in AUDIO_FAMILIES:
        return SOUNDS
    if case == "qwen2_5_omni+mixed":
        return CLIPS[1], SOUNDS[0]
    return CLIPS if case in VIDEO_CASES else (ONE, TWO)


def prompts(case: str) -> dict[str, Parts]:
    one, two = items(case)
    found: dict[str, Parts] = {
        "both": [list(range(100, 117)), one, [11, 12, 13, 14, 15], two, [20, 21, 22]],
        "one": [[5, 6, 9, 10], one, list(range(60, 80))],
        "other": [[5, 6, 9, 10], one, [90, 91, 92]],
        "twice": [[6, 7, 8], two, [90, 91, 92], two, [93]],
        "text": [[40, 41, 42, 43, 44, 45, 46, 47, 48]],
    }
    return (
        {name: surrounded(parts) for name, parts in found.items()} if case in OMNI_CASES else found
    )


@cache
def load(family: str) -> CausalModel:
    return CausalModel.load(
        EngineSettings.of(model=str(directory_of(family)), device="cpu", num_threads=1)
    )


@cache
def readers(family: str) -> Any:
    """The engine's readers, by kind."""
    return readers_of(directory_of(family), parsed_config(directory_of(family)), spec(family))


def tower_inputs(family: str, run: Media) -> Inputs:
    """What the engine's reader makes of a file."""
    inputs: Inputs = readers(family)[run.kind].plan(run).read()
    return inputs


@cache
def _encoded(family: str, digest: bytes, run: Media) -> Rows | InlayError:
    del digest
    model = load(family)
    inputs = tower_inputs(family, run)
    (arrays,) = Tower(model.tower, model.hidden_size).encode([inputs], [run.total])
    return arrays if isinstance(arrays, InlayError) else as_rows(arrays)


def encoded(family: str, item: Item) -> Rows:
    """The rows of an item, by tower and reader of the engine."""
    run = run_of(family, item)
    rows = _encoded(family, run.digest, run)
    assert isinstance(rows, Rows)
    return rows


def run_of(family: str, item: Item) -> Media:
    """The first run of an item, which has its file."""
    return next(part for part in segments_of(family, item) if isinstance(part, Media))


class Engine:
    """A core whose images are encoded between two steps."""

    def __init__(self, family: str, capture: Capture | None = None, **changes: int) -> None:
        limits: dict[str, Any] = {
            "max_model_len": 200,
            "max_num_seqs": 8,
            "max_num_batched_tokens": 23,
            "page_size": 16,
            "num_pages": 80,
        }
        if family == "gemma4":
            # An image of 70 rows is not cut.
            limits |= {"max_model_len": 320, "max_num_batched_tokens": 80}
        self.family = family
        self.asked: list[tuple[str, Need]] = []
        self.num_encoded = 0
        self.core = Core(
            load(family),
            EngineLimits(**(limits | changes)),
            Secret(bytes(32)),
            capture=capture,
            ask=lambda request, need: self.asked.append((request, need)),
        )

    def step(self) -> list[Output]:
        outputs = self.core.step()
        for request, need in self.asked:
            assert need.item is not None
            assert need.item.data is not None
            rows = _encoded(self.family, need.key, need.item)
            outputs += self.core.fulfil(request, need, rows)
            self.num_encoded += 1
        self.asked.clear()
        return outputs

    def run(
        self, *names: str, prior: int = 0, preempt_at: tuple[int, ...] = ()
    ) -> dict[str, tuple[list[int], Values, Values]]:
        """Continue prompts together: ids, and ids and logprobs of the likeliest 20 tokens.

        Before the steps of `preempt_at`, every running sequence loses its pages.
        """
        outputs: list[Output] = []
        for name in names:
            sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=20)
            known = tuple(generated(self.family, prompts(self.family)[name], NEW).ids[:prior])
            outputs += self.core.admit(
                Request(
                    id=name,
                    prompts=(prompt_of(self.family, prompts(self.family)[name]),),
                    params=sampling,
                    prior_output=known,
                )
            )
        steps = 0
        while len(self.core):
            if steps in preempt_at:
                self.core.reset_prefix_cache()
                for sequence in tuple(self.core.scheduler.running):
                    self.core.scheduler._preempt(sequence)
            outputs += self.step()
            steps += 1
        return {name: _joined([out for out in outputs if out.request_id == name]) for name in names}


def _joined(outputs: list[Output]) -> tuple[list[int], Values, Values]:
    assert all(output.error is None for output in outputs), outputs[-1].error
    top = [logprobs.top for output in outputs for logprobs in output.logprobs]
    return (
        [id_ for output in outputs for id_ in output.token_ids],
        torch.tensor([[id_ for id_, _ in each] for each in top]),
        torch.tensor([[value for _, value in each] for each in top]),
    )


def check(family: str, found: dict[str, tuple[list[int], Values, Values]], prior: int = 0) -> None:
    for name, (ids, top, logprobs) in found.items():
        truth = generated(family, prompts(family)[name], NEW)
        expected = truth.logits[prior:].log_softmax(-1).gather(1, top)
        difference = float((logprobs - expected).abs().max())
        assert difference < 2e-4, (name, difference)
        assert ids == truth.ids[prior:], name


@pytest.mark.thorough
@pytest.mark.usefixtures("overlap")
@pytest.mark.parametrize("family", CASES)
def test_images_in_chunks_and_from_the_cache_give_the_logits_of_transformers(family: str) -> None:
    engine = Engine(family)
    for name in ("both", "one", "text", "both"):
        check(family, engine.run(name))
    assert engine.core.stats().cached_tokens > 0


@pytest.mark.parametrize("family", CASES)
def test_neighbours_and_preemption_change_nothing(family: str) -> None:
    engine = Engine(family)
    check(family, engine.run("other", "one", "text", "twice", preempt_at=(4, 9)))
    assert engine.core.stats().preemptions > 0
    # Preempted or not, an image is encoded once for a request.
    assert engine.num_encoded <= 3


@pytest.mark.parametrize("family", CASES)
def test_a_resumed_request_goes_on_as_it_would_have(family: str) -> None:
    check(family, Engine(family).run("one", "text", prior=3), prior=3)


@pytest.mark.parametrize("family", CASES)
def test_a_cached_prefix_with_its_image_is_not_encoded(family: str) -> None:
    engine = Engine(family)
    check(family, engine.run("one"))
    assert engine.num_encoded == 1
    check(family, engine.run("one"))
    assert engine.num_encoded == 1
    # Here the cached prefix may end inside the image.
    check(family, engine.run("other"))


@pytest.mark.parametrize("family", ["llava", "qwen3_vl"])
def test_an_image_that_cannot_be_encoded_ends_its_request_alone(family: str) -> None:
    engine = Engine(family)
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=20)
    made = {name: prompt_of(family, prompts(family)[name]) for name in ("one", "text")}
    outputs: list[Output] = []
    for name, prompt in made.items():
        outputs += engine.core.admit(Request(id=name, prompts=(prompt,), params=sampling))
    outputs += engine.core.step()
    ((request, need),) = engine.asked
    engine.asked.clear()
    assert request == "one"
    outputs += engine.core.fulfil(request, need, EngineError("no such tower"))
    while len(engine.core):
        outputs += engine.core.step()
    (ended,) = (output for output in outputs if output.request_id == "one")
    assert ended.error is not None
    assert ended.error.message == "no such tower"
    check(family, {"text": _joined([out for out in outputs if out.request_id == "text"])})


def test_rows_of_another_number_end_the_request() -> None:
    engine = Engine("llava")
    prompt = prompt_of("llava", prompts("llava")["one"])
    engine.core.admit(Request(id="one", prompts=(prompt,), params=Sampling(max_tokens=1)))
    engine.core.step()
    ((request, need),) = engine.asked
    rows = encoded("llava", ONE)
    (output,) = engine.core.fulfil(request, need, rows.slice(0, 3))
    assert output.error is not None
    assert "made 3 rows of an image laid out as 16" in output.error.message
    assert not len(engine.core)


def test_an_engine_that_waits_for_images_rests() -> None:
    engine = Engine("llava")
    prompt = prompt_of("llava", prompts("llava")["one"])
    engine.core.admit(Request(id="a", prompts=(prompt,), params=Sampling(max_tokens=1)), 7.0)
    assert engine.core.rest(1.0) == 0
    assert engine.core.step() == []
    assert engine.core.rest(1.0) == 6
    engine.core.abort("a")
    assert engine.core.rest(1.0) is None


def test_the_next_sequences_images_are_asked_for_while_it_waits_for_a_place() -> None:
    engine = Engine("llava", max_num_seqs=1)
    params = Sampling(max_tokens=NEW, ignore_eos=True)
    for name in ("text", "one"):
        prompt = prompt_of("llava", prompts("llava")[name])
        engine.core.admit(Request(id=name, prompts=(prompt,), params=params))
    engine.core.step()
    assert [request for request, _ in engine.asked] == []
    engine.core.step()
    assert [request for request, _ in engine.asked] == ["one"]
    assert len(engine.core.scheduler.waiting) == 1


def test_an_image_with_rows_that_are_not_finite_does_not_harm_its_neighbours() -> None:
    model = load("internvl")
    inputs = [tower_inputs("internvl", run_of("internvl", item)) for item in (ONE, TWO, ONE)]
    inputs[1]["pixel_values"] = inputs[1]["pixel_values"] * float("nan")
    found = Tower(model.tower, model.hidden_size).encode(inputs, [20, 12, 20])
    first, bad, last = found
    assert isinstance(bad, InvalidRequestError)
    assert bad.message == "the rows of an item are not finite"
    expected = encoded("internvl", ONE)
    for good in (first, last):
        assert not isinstance(good, InlayError)
        assert as_rows(good) == expected


@pytest.mark.parametrize("family", CASES)
def test_images_that_are_encoded_together_have_the_rows_they_have_alone(family: str) -> None:
    model = load(family)
    third: dict[type, Item] = {Picture: Picture(9, 20, 90), Sound: Sound(9, 29_000), Clip: CLIPS[0]}
    one, two = items(family)
    files = [one, two, third[type(one)]] if type(one) is type(two) else [one, third[type(one)]]
    runs = [run_of(family, file) for file in files]
    inputs = [tower_inputs(family, run) for run in runs]
    together = Tower(model.tower, model.hidden_size).encode(inputs, [run.total for run in runs])
    for file, found in zip(files, together, strict=True):
        assert not isinstance(found, InlayError)
        alone = encoded(family, file)
        expected = torch.frombuffer(bytearray(alone.data.view), dtype=torch.float32)
        assert (torch.from_numpy(found[ROWS]).flatten() - expected).abs().max() < 1e-4


@pytest.mark.parametrize("samples", [401, 9_000, 18_003, 31_999])
def test_a_sound_that_is_not_filled_up_has_the_frames_of_one_that_is(samples: int) -> None:
    sound = Sound(4, samples)
    found = tower_inputs("qwen2_5_omni", run_of("qwen2_5_omni", sound))
    filled = spectra("qwen2_5_omni", [sound])
    frames = int(filled["feature_attention_mask"].sum())
    assert found["input_features"].shape[-1] == frames
    # Products of another size are added up in another order.
    difference = found["input_features"] - filled["input_features"][..., :frames]
    assert float(difference.abs().max()) < 1e-6
    assert bool(found["feature_attention_mask"].all())


def test_every_family_with_images_is_tested_and_listed() -> None:
    tested = {AutoConfig.from_pretrained(directory_of(case)).model_type for case in CASES}
    assert tested == set(MEDIA_FAMILIES)
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    for model_type in MEDIA_FAMILIES:
        assert f"`{model_type}`" in page, model_type


def difference(family: str, name: str, found: dict[str, Any]) -> float:
    """Largest difference from transformers' logprobs, of the first token."""
    _, top, logprobs = found[name]
    expected = generated(family, prompts(family)[name], NEW).logits[:1].log_softmax(-1)
    return float((logprobs[:1] - expected.gather(1, top[:1])).abs().max())


@pytest.mark.parametrize("family", CASES)
def test_the_tiny_models_tell_a_wrong_picture(family: str) -> None:
    prompt = list(prompts(family)["one"])
    expected = generated(family, prompt, NEW).logits[0]
    prompt[1] = replace(items(family)[0], seed=77)
    assert 5 < expected.abs().max() < 40
    assert (generated(family, prompt, NEW).logits[0] - expected).abs().max() > 0.3


@pytest.mark.parametrize(
    "family", [name for name in (*FAMILIES, *OMNI_CASES) if name.startswith(("qwen", "glm"))]
)
def test_positions_of_one_axis_would_be_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load(family), "rope_axes", 1)
    assert difference(family, "one", Engine(family).run("one")) > 0.1


def test_causal_attention_inside_images_would_be_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load("gemma3"), "bidirectional", "none")
    assert difference("gemma3", "one", Engine("gemma3").run("one")) > 0.1


@pytest.mark.parametrize("layers", ["none", "all"])
def test_bidirectional_attention_in_other_layers_would_be_seen(
    layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(load("gemma4"), "bidirectional", layers)
    assert difference("gemma4", "one", Engine("gemma4").run("one")) > 0.1


@pytest.mark.parametrize("family", ["qwen3_vl", "qwen3_vl_moe"])
def test_missing_inner_features_would_be_seen(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(batch, "_features", lambda rows: None)
    assert difference(family, "one", Engine(family).run("one")) > 0.1


@pytest.mark.parametrize(
    "family",
    [
        "llava", "gemma3", "qwen2_vl", "qwen3_vl", "glm4v", "qwen2_5_omni", "mistral3", "pixtral",
        "idefics3", "smolvlm", "llama4",
    ],
)  # fmt: skip
def test_rows_that_a_client_made_with_the_same_encoder_give_the_same(family: str) -> None:
    parts: list[Segment] = []
    for part in prompts(family)["both"]:
        if isinstance(part, list):
            parts.append(Tokens(part))
            continue
        assert isinstance(part, Picture)
        laid = layout(spec(family), part.height, part.width)
        rows = encoded(family, part)
        arrays = [
            np.frombuffer(data.view, np.float32).reshape(len(rows), -1)
            for data in (rows.data, *(field.data for field in rows.bundle))
        ]
        wide = np.concatenate(arrays, axis=1)
        tensor = Tensor(Buffer(wide.tobytes()), "float32", wide.shape, "npy")
        parts += embeds_segments(
            spec(family),
            tensor,
            grid=laid.given_grid,
            hidden_size=load(family).hidden_size,
            dtype="float32",
        )
    engine = Engine(family)
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=20)
    request = Request(id="both", prompts=(Prompt.of(*parts),), params=sampling)
    outputs = engine.core.admit(request)
    while len(engine.core):
        outputs += engine.step()
    assert engine.num_encoded == 0
    check(family, {"both": _joined(outputs)})


@pytest.mark.parametrize("block", [1, 5, 64])
def test_images_that_blocks_of_queries_cut_are_seen_whole(
    block: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Without native kernels, which cut them anyway.
    monkeypatch.setattr(choice, "kernels", lambda: None)
    for name, value in (("_SCORE_BYTES", 0), ("_MIN_BLOCK", block), ("_MAX_BLOCK", block)):
        monkeypatch.setattr(gathered, name, value)
    engine = Engine("gemma3", max_num_batched_tokens=64)
    check("gemma3", engine.run("both", "one"))


def test_others_finish_while_a_sequence_waits_for_its_image() -> None:
    engine = Engine("llava")
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True, logprobs=20)
    outputs: list[Output] = []
    for name in ("one", "text"):
        prompt = prompt_of("llava", prompts("llava")[name])
        outputs += engine.core.admit(Request(id=name, prompts=(prompt,), params=sampling))
    while len(engine.core) == 2:
        outputs += engine.core.step()
    assert {output.request_id for output in outputs} == {"text"}
    # The image is asked for once, however many steps have passed.
    assert len(engine.asked) == 1
    while len(engine.core):
        outputs += engine.step()
    for name in ("one", "text"):
        check("llava", {name: _joined([out for out in outputs if out.request_id == name])})
