"""Heads that read hidden states: their guesses are the reference's, and change no output."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.speculation import speculative_config
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.grammar.grammars import Grammars
from inlay.engine.torch.loading import captures
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.needs import Need
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation.draft_head import DraftHead, HeadDrafter
from inlay.engine.torch.speculation.eagle import load_eagle
from inlay.engine.torch.speculation.mtp import load_mtp
from inlay.engine.torch.step import Core
from inlay.messages.hidden_states import HiddenStates
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Request
from tests.deepseek import plain_r1, tiny_r1, write
from tests.draft_heads import (
    EagleReference,
    HeadReference,
    MtpReference,
    VisionMtpReference,
    write_eagle,
    write_mtp,
    write_qwen_mtp,
    write_vision_mtp,
)
from tests.engine import reference
from tests.engine.conformance import run as run_in
from tests.engine.torch import test_vision
from tests.engine.torch.test_hidden_states import assert_right
from tests.engine.torch.test_overlap import core as plain
from tests.engine.torch.test_overlap import outcomes
from tests.engine.torch.test_speculation import EvenCosts
from tests.engine.torch.test_step import SECRET, ids, load, make_request, prompts, run
from tests.engine.torch.vision_reference import inputs_of, prompt_of
from tests.models import make, tiny

FEW = (40, 77, 78, 200)
"""A vocabulary so small that some guesses are right where a bias allows nothing else."""

BIAS = dict.fromkeys(FEW, 1000.0)


class Checked(HeadDrafter):
    """A head whose guesses are compared with those of one that remembers nothing."""

    def __init__(
        self, head: DraftHead, model: CausalModel, plain: HeadReference, num_pages: int = 64
    ) -> None:
        super().__init__(head, model, num_pages, 16)
        self.reference = plain
        self.compared = 0

    @classmethod
    def eagle(cls, directory: Path, model: CausalModel, num_pages: int = 64) -> "Checked":
        plain = EagleReference(directory, Path(model.path))
        return cls(load_eagle(directory, model), model, plain, num_pages)

    def draft(
        self, counts: Mapping[Sequence, int], room: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        found = super().draft(counts, room)
        for sequence, drafts in found.items():
            expected = self.reference.guess(sequence.prompt, sequence.output, counts[sequence])
            assert list(drafts) == expected
            self.compared += len(drafts)
        return found


def core(drafter: HeadDrafter, model: CausalModel, **changes: int) -> Core:
    values: dict[str, Any] = {
        "max_model_len": 160,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 64,
        "page_size": 16,
        "num_pages": 64,
    }
    return Core(
        model,
        EngineLimits(**(values | changes)),
        SECRET,
        speculator=EvenCosts(drafter, 4, drafter),
    )


def some() -> list[Request]:
    """Text, rows between text, rows at the end, and a prompt of several chunks."""
    return [
        make_request(name, prompts("llama")[name], 16, logit_bias=BIAS)
        for name in ("b-text", "a-mixed", "d-soft", "e-soft", "c-text")
    ]


LAYOUTS: dict[str, dict[str, Any]] = {
    "a part of the tokens": {"tokens": FEW},
    "all tokens": {},
    "its own table": {"tokens": FEW, "own_table": True},
    "speculators": {"tokens": FEW, "speculators": True, "layers": [1, 2]},
}


@pytest.mark.parametrize("layout", LAYOUTS)
def test_guesses_are_those_of_the_reference_and_outputs_those_without(
    layout: str, tmp_path: Path
) -> None:
    model = load("llama")
    drafter = Checked.eagle(write_eagle(tmp_path, tiny("llama"), **LAYOUTS[layout]), model)
    engine = core(drafter, model)
    expected = run(plain(overlap=False), *some())
    # The second time a prefix is cached, for the head too.
    for _ in range(2):
        found = run(engine, *some())
        assert {name: of.output for name, of in found.items()} == {
            name: of.output for name, of in expected.items()
        }
    stats = engine.stats()
    assert found["c-text"].cached == 80
    assert drafter.compared == stats.num_draft_tokens > 150
    assert layout == "all tokens" or stats.num_accepted_tokens > 10
    assert not drafter._tips
    assert not drafter._computed


@pytest.mark.thorough
@pytest.mark.parametrize(
    "changes", [{}, {"num_pages": 14, "max_num_batched_tokens": 24}], ids=["roomy", "tight"]
)
def test_every_setting_gives_what_it_gives_without(changes: dict[str, int], tmp_path: Path) -> None:
    model = load("llama")
    grammars = Grammars(Path(model.path), model.vocab_size, model.eos_token_ids)
    head = load_eagle(write_eagle(tmp_path, tiny("llama")), model)
    try:
        expected = outcomes(plain(overlap=False, **changes), grammars)
        drafter = HeadDrafter(head, model, changes.get("num_pages", 64), 16)
        engine = core(drafter, model, **changes)
        found = outcomes(engine, grammars)
    finally:
        grammars.close()
    assert {name: of[:2] for name, of in found.items()} == {
        name: of[:2] for name, of in expected.items()
    }
    stats = engine.stats()
    assert stats.num_draft_tokens > 50
    assert ("num_pages" in changes) == (stats.preemptions > 0)
    assert stats.blocks_used == 0
    assert not drafter._tips


def test_layers_are_the_reference_implementations_unless_named(tmp_path: Path) -> None:
    path = make("llama", tmp_path / "model", num_hidden_layers=7)
    model = CausalModel.load(EngineSettings.of(model=str(path), device="cpu", num_threads=1))
    head = write_eagle(tmp_path / "head", path, layers=None, tokens=FEW)
    drafter = Checked.eagle(head, model)
    assert drafter.layers == (2, 3, 4)
    run(core(drafter, model), make_request("a", Prompt.of(Tokens(ids(1, 20))), 12, logit_bias=BIAS))
    assert drafter.compared > 10


def test_layers_with_a_window_do_not_keep_a_head_from_seeing_all_positions(tmp_path: Path) -> None:
    model = load("gpt_oss")
    assert len(model.windows) > 1
    drafter = Checked.eagle(write_eagle(tmp_path, tiny("gpt_oss"), tokens=FEW), model)
    prompt = Prompt.of(Tokens(ids(3, 60)))
    expected = run(
        Core(model, core(drafter, model).bounds, SECRET),
        make_request("a", prompt, 30, logit_bias=BIAS),
    )
    found = run(core(drafter, model), make_request("a", prompt, 30, logit_bias=BIAS))
    assert found["a"].output == expected["a"].output
    assert drafter.compared > 30


def test_hidden_states_that_a_request_asks_for_are_what_they_are_without(tmp_path: Path) -> None:
    model = load("llama")
    drafter = Checked.eagle(write_eagle(tmp_path, tiny("llama"), tokens=FEW), model)
    prompt = prompts("llama")["e-soft"]
    asked = make_request(
        "a", prompt, 9, hidden_states=HiddenStates(layers=(0, 1, 2), prompt=-1, output=True)
    )
    other = make_request("b", prompts("llama")["b-text"], 20, logit_bias=BIAS)
    found = run(core(drafter, model), asked, other)
    assert_right(found["a"], asked)
    assert drafter.compared > 20


def test_a_prompt_whose_states_are_not_finite_spoils_no_page_of_the_head(tmp_path: Path) -> None:
    model = load("llama")
    drafter = Checked.eagle(write_eagle(tmp_path, tiny("llama"), tokens=FEW), model, 16)
    engine = core(drafter, model, num_pages=16)
    # Long enough that the head reads the first chunk before the last one ends the request.
    wild = Prompt.of(reference.rows_of(torch.full((100, model.hidden_size), 3e38)))
    assert run(engine, make_request("a", wild, 5))["a"].last.error is not None
    assert torch.isfinite(drafter._pages.keys[0]).all()
    assert torch.isfinite(drafter._pages.values[0]).all()
    run(engine, *some()[:2])
    assert drafter.compared > 20


# Multi-token prediction


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["deepseek_v3", "qwen3_next", "qwen3_5_text"])
def test_a_prediction_layer_guesses_as_the_reference_does_and_changes_no_output(
    family: str, tmp_path: Path
) -> None:
    qwen = family != "deepseek_v3"
    path = tmp_path / "model"
    path = write_qwen_mtp(path, family) if qwen else write_mtp(path)
    model = CausalModel.load(EngineSettings.of(model=str(path), device="cpu", num_threads=1))
    plain = MtpReference(path, tmp_path / "layer", qwen=qwen)
    drafter = Checked(load_mtp(model), model, plain)
    table = reference.look_up(path, ids(5, 20))
    mixed = Prompt.of(Tokens(ids(1, 50)), reference.rows_of(table), Tokens(ids(6, 9)))
    text = Prompt.of(Tokens(ids(2, 30)))
    requests = [
        make_request("a", mixed, 12, logit_bias=BIAS),
        make_request("b", text, 12, temperature=0.9, seed=4),
    ]
    bounds = core(drafter, model).bounds
    expected = run(Core(model, bounds, SECRET), *requests)
    found = run(core(drafter, model), *requests)
    for name, of in expected.items():
        assert found[name].output == of.output
    assert drafter.compared > 20


@pytest.mark.thorough
@pytest.mark.parametrize("family", ["qwen3_5", "qwen3_5_moe", "qwen3_5+video"])
def test_a_prediction_layer_guesses_after_media_as_the_reference_does(
    family: str, tmp_path: Path
) -> None:
    """Items are cut by steps of 23 positions, and looked for in the cache the second time."""
    path = write_vision_mtp(tmp_path / "model", family.removesuffix("+video"))
    model = CausalModel.load(EngineSettings.of(model=str(path), device="cpu", num_threads=1))
    parts = test_vision.prompts(family)["both"]
    prompt = prompt_of(family, parts)
    plain = VisionMtpReference(
        path, tmp_path / "layer", lambda output: inputs_of(family, [*parts, output])
    )
    drafter = Checked(load_mtp(model), model, plain, 80)
    asked: list[tuple[str, Need]] = []
    outputs = []
    for speculator in (None, EvenCosts(drafter, 4, drafter)):
        engine = Core(
            model,
            EngineLimits(
                max_model_len=200, max_num_seqs=8, max_num_batched_tokens=23, page_size=16,
                num_pages=80,
            ),
            SECRET,
            ask=lambda request, need: asked.append((request, need)),
            speculator=speculator,
        )  # fmt: skip
        for name in ("first", "again"):
            found = engine.admit(make_request(name, prompt, 12, logit_bias=BIAS))
            while len(engine):
                found += engine.step()
                for request, need in asked:
                    assert need.item is not None
                    rows = test_vision._encoded(family, need.key, need.item)
                    found += engine.fulfil(request, need, rows)
                asked.clear()
            outputs.append([id_ for output in found for id_ in output.token_ids])
    assert outputs == [outputs[0]] * 4
    assert len(outputs[0]) == 12
    assert drafter.compared > 20


def test_a_prediction_layer_in_fp8_is_read_as_the_model_is(tmp_path: Path) -> None:
    model = CausalModel.load(
        EngineSettings.of(model=str(tiny_r1()), device="cpu", num_threads=1, dtype="float32")
    )
    plain = MtpReference(plain_r1(), tmp_path / "layer")
    drafter = Checked(load_mtp(model), model, plain)
    prompt = Prompt.of(Tokens(ids(1, 20)))
    run(core(drafter, model), make_request("a", prompt, 12))
    assert drafter.compared > 5


async def test_a_model_without_a_prediction_layer_is_refused(tmp_path: Path) -> None:
    without = write(tmp_path / "without", next_token_layer=False)
    for path, said in (
        (tiny("llama"), "models of type 'llama' are not read; allowed: deepseek_v3"),
        (without, "the model's files have no layer of multi-token prediction"),
    ):
        text = '{"method": "mtp", "num_speculative_tokens": 1}'
        engine = with_head(path, path, speculative_config=text)
        with pytest.raises(InvalidRequestError, match=said):
            await engine.start()
        await engine.close()


# Settings


def with_head(model: Path, head: Path, **changes: Any) -> TorchEngine:
    text = json.dumps({"method": "eagle3", "model": str(head), "num_speculative_tokens": 3})
    values: dict[str, Any] = {
        "model": str(model), "device": "cpu", "num_threads": 1, "speculative_config": text,
        "kv_cache_memory_bytes": 8 << 20, "enable_sleep_mode": True,
    }  # fmt: skip
    return TorchEngine(EngineSettings.of(**(values | changes)), SECRET)


@pytest.mark.thorough
@pytest.mark.usefixtures("even_steps")
async def test_a_head_is_loaded_with_the_engine_and_again_after_sleep(tmp_path: Path) -> None:
    engine = with_head(tiny("llama"), write_eagle(tmp_path, tiny("llama"), tokens=FEW[:1]))
    await engine.start()
    try:
        for _ in range(2):
            request = make_request(
                "a", Prompt.of(Tokens([5, 6, 7])), 40, logit_bias={FEW[0]: 1000.0}
            )
            (receiver,) = await run_in(engine, request)
            assert receiver.last.error is None
            await engine.sleep(2)
            assert await engine.wake_up(())
        assert engine.stats().num_accepted_tokens > 20
        # The head's keys and values are in the same memory.
        alone = TorchEngine(
            EngineSettings.of(
                model=str(tiny("llama")), device="cpu", num_threads=1,
                kv_cache_memory_bytes=8 << 20,
            ),
            SECRET,
        )  # fmt: skip
        await alone.start()
        await alone.close()
        assert engine.card.num_blocks < alone.card.num_blocks
    finally:
        await engine.close()


@pytest.mark.parametrize(
    ("served", "changes", "said"),
    [
        ("llama", {"hidden_size": 16}, "the head's hidden size is 16, the model's "),
        ("mistral", {}, "every layer of the model has a window"),
        ("gemma", {}, "models of type 'gemma' have no such heads"),
        ("llama", {"layers": [0, 5, 9]}, "reads layers [0, 5, 9] of a model that has"),
        ("llama", {"num_hidden_layers": 2}, "2 layers of type 'llama'"),
        ("llama", {"model_type": "qwen3"}, "1 layers of type 'qwen3'"),
        ("llama", {"norm_before_fc": True}, "another variant (norm_before_fc)"),
        ("llama", {"speculators_model_type": "eagle"}, "another variant (eagle"),
        ("llama", {"intermediate_size": 81}, "mlp.gate_proj.weight is (80, "),
    ],
)
def test_a_head_that_does_not_fit_is_refused(
    served: str, changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    head = write_eagle(tmp_path, tiny(served), **changes)
    with pytest.raises(InvalidRequestError) as refused:
        load_eagle(head, load(served))
    assert refused.value.message.startswith("--speculative-config: eagle3: ")
    assert said in refused.value.message


def test_a_head_of_another_vocabulary_is_refused(tmp_path: Path) -> None:
    other = make("llama", tmp_path / "other", vocab_size=400)
    cases: tuple[tuple[str, dict[str, Any], str], ...] = (
        ("mapped", {"tokens": FEW}, "the head is for 400 tokens; the model has 384"),
        ("whole", {}, "the head's 400 tokens are not all among the 384 of the model"),
    )
    for name, changes, said in cases:
        head = write_eagle(tmp_path / name, other, **changes)
        with pytest.raises(InvalidRequestError, match=said):
            load_eagle(head, load("llama"))
    head = write_eagle(tmp_path / "before", tiny("llama"), tokens=(-1, *FEW[1:]))
    with pytest.raises(InvalidRequestError, match="not all among the 384"):
        load_eagle(head, load("llama"))


def test_a_name_with_eagle3_is_a_head_and_steps_with_heads_are_not_captured() -> None:
    text = '{"model": "someone/EAGLE3-x", "num_speculative_tokens": 3}'
    settings = EngineSettings.of(model="m", speculative_config=text)
    found = speculative_config(settings)
    assert found is not None
    assert found.method == "eagle3"
    assert captures(settings.compute, load("llama"), None)
    assert not captures(settings.compute, load("llama"), found)
