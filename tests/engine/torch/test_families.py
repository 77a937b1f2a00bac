"""Every family of `docs/models.md` through the whole engine at tiny random models.

Text, rows and mixtures give what `transformers.generate` gives, exactly in float32; what a family
asks for beyond that is refused with the reason.
"""

import json
import shutil
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
)

from inlay.base.errors import InvalidRequestError
from inlay.client import PromptEmbedder
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.engine.torch.weights.families import FAMILIES as SERVED
from inlay.engine.torch.weights.families import PER_LAYER, REFUSED, family_of
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Output, Request, Sampling, TokenLogprobs
from tests import lifelike
from tests.engine import reference
from tests.models import FAMILIES, VOCAB_SIZE, make, tiny

NEW = 20
"""Tokens each prompt is continued by.

Sequences outgrow windows, pages and the memory they share.
"""


@cache
def load(family: str) -> CausalModel:
    return CausalModel.load(EngineSettings.of(model=str(tiny(family)), device="cpu", num_threads=1))


def core_of(model: CausalModel, **changes: int) -> Core:
    values: dict[str, Any] = {
        "max_model_len": 110,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 32,
        "page_size": 16,
        "num_pages": 64,
    }
    return Core(model, EngineLimits(**(values | changes)), Secret(bytes(32)), prefix_caching=True)


def ids(seed: int, count: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()


def noise(family: str, count: int) -> Rows:
    """Rows that no token has."""
    generator = torch.Generator().manual_seed(4)
    return reference.rows_of(
        0.5 * torch.randn(count, load(family).hidden_size, generator=generator)
    )


def prompts(family: str) -> dict[str, Prompt]:
    """Those of one letter have the same positions."""
    a, b = ids(1, 50), ids(2, 7)
    in_table = reference.rows_of(reference.look_up(tiny(family), a))
    return {
        "a-text": Prompt.of(Tokens(a)),
        "a-rows": Prompt.of(in_table),
        "a-mixed": Prompt.of(Tokens(a[:20]), in_table.slice(20, 33), Tokens(a[33:])),
        "b-text": Prompt.of(Tokens(b)),
        "c-soft": Prompt.of(noise(family, 9), Tokens(b)),
    }


@cache
def truth(family: str) -> dict[str, list[int]]:
    """Output of transformers for the first prompt of each letter."""
    return {
        name[0]: reference.greedy(tiny(family), prompt, NEW)
        for name, prompt in prompts(family).items()
        if name in ("a-text", "b-text", "c-soft")
    }


def run(engine: Core, family: str, *names: str) -> dict[str, list[int]]:
    """Continue prompts together."""
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    outputs: list[Output] = []
    for name in names:
        outputs += engine.admit(Request(id=name, prompts=(prompts(family)[name],), params=sampling))
    while len(engine):
        outputs += engine.step()
    return {
        name: [id_ for output in outputs if output.request_id == name for id_ in output.token_ids]
        for name in names
    }


@pytest.mark.thorough
@pytest.mark.parametrize("family", FAMILIES)
def test_text_rows_and_mixtures_in_chunks_and_from_the_cache_decode_as_transformers_does(
    family: str,
) -> None:
    engine = core_of(load(family))
    for name in prompts(family):
        assert run(engine, family, name)[name] == truth(family)[name[0]], name
    assert engine.stats().cached_tokens > 0


@pytest.mark.parametrize("family", FAMILIES)
def test_neighbours_and_preemption_change_nothing(family: str) -> None:
    sizes: dict[str, Any] = {
        "max_model_len": 110,
        "max_num_seqs": 8,
        "max_num_batched_tokens": 37,
        "page_size": 16,
    }
    windows = load(family).windows
    alone = EngineLimits(**sizes, num_pages=1, windows=windows).most_pages(110, 37)
    engine = core_of(load(family), **sizes, num_pages=alone + 1)
    names = ("a-rows", "b-text", "c-soft", "a-mixed")
    found = run(engine, family, *names)
    assert engine.stats().preemptions > 0
    assert found == {name: truth(family)[name[0]] for name in names}


def next_token(model: CausalModel, prompt: Prompt, **changes: int) -> TokenLogprobs:
    """The engine's logprobs of the token after `prompt`."""
    engine = core_of(model, **changes)
    sampling = Sampling(max_tokens=1, temperature=0.0, logprobs=20)
    outputs = list(engine.admit(Request(id="one", prompts=(prompt,), params=sampling)))
    while len(engine):
        outputs += engine.step()
    return outputs[-1].logprobs[0]


@torch.no_grad()
def expected_logprobs(directory: Path, prompts: Sequence[list[int]], dtype: torch.dtype) -> Tensor:
    """Transformers' logprobs of the token after each prompt."""
    model = AutoModelForCausalLM.from_pretrained(
        directory, dtype=dtype, attn_implementation="eager"
    )
    found: Tensor = model(torch.tensor(prompts)).logits[:, -1].float().log_softmax(-1)
    return found


@pytest.mark.parametrize("family", FAMILIES)
def test_in_bfloat16_rows_of_the_clients_table_are_the_engines_own(family: str) -> None:
    directory = lifelike.text(family)
    settings = EngineSettings.of(
        model=str(directory), device="cpu", num_threads=1, max_model_len=512
    )
    model = CausalModel.load(settings)
    assert model.dtype == torch.bfloat16
    prompt = ids(5, 60)
    looked_up = PromptEmbedder.from_pretrained(directory).embed_tokens(prompt).rows
    rows = Rows(Buffer(looked_up.tobytes()), "bfloat16", (60, model.hidden_size))
    by_rows, by_ids = (
        next_token(model, Prompt.of(segment), max_num_batched_tokens=64)
        for segment in (rows, Tokens(prompt))
    )
    assert by_rows == by_ids


def logits(family: str, **changes: Any) -> Tensor:
    """Of transformers at each of 77 tokens, its configuration changed."""
    model = AutoModelForCausalLM.from_pretrained(tiny(family), dtype=torch.float32, **changes)
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids(7, 77)])).logits[0]
    return found


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("deepseek_v2", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"n_group": 1, "topk_group": 1}),
        ("deepseek_v3", {"rope_interleave": False}),
        ("gemma2", {"attn_logit_softcapping": None}),
        ("gemma2", {"final_logit_softcapping": None}),
        ("gemma2", {"query_pre_attn_scalar": 24}),
        ("gemma2", {"sliding_window": 512}),
        ("gemma3_text", {"sliding_window": 512}),
        ("gemma3_text", {"layer_types": ["full_attention"] * 3}),
        ("gpt_oss", {"sliding_window": 512}),
        ("llama3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
        ("mistral", {"sliding_window": None}),
        ("mixtral", {"num_experts_per_tok": 1}),
        (
            "phi",
            {
                "rope_parameters": {
                    "rope_type": "default",
                    "rope_theta": 1e4,
                    "partial_rotary_factor": 1.0,
                }
            },
        ),
        ("phi3", {"sliding_window": None}),
        ("qwen3_moe", {"norm_topk_prob": False}),
    ],
)
def test_the_tiny_models_feel_what_is_special_about_their_family(
    family: str, changes: dict[str, Any]
) -> None:
    assert (logits(family, **changes) - logits(family)).abs().max() > 1e-3


def test_layers_say_what_they_keep() -> None:
    sliding, full = LayerShape(24, 2, 24, 24), LayerShape(None, 2, 24, 24)
    assert load("gemma2").layers == load("gemma3_text").layers == (sliding, full, sliding)
    assert load("deepseek_v3").layers == (LayerShape(None, 1, 24, 16, latent=True),) * 2
    assert load("phi3").layers == (LayerShape(24, 2, 16, 16),) * 2
    assert load("llama2").layers == (LayerShape(None, 4, 16, 16),) * 2


def test_every_family_that_is_served_is_tested_and_listed() -> None:
    tested = {AutoConfig.from_pretrained(tiny(family)).model_type for family in FAMILIES}
    assert tested == set(SERVED)
    page = (Path(__file__).parents[3] / "docs" / "models.md").read_text()
    for model_type in (*SERVED, *REFUSED):
        assert f"`{model_type}`" in page, model_type


def changed(family: str, tmp_path: Path, **fields: Any) -> Path:
    copy = tmp_path / "changed"
    shutil.copytree(tiny(family), copy)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps({**config, **fields}))
    return copy


@pytest.mark.parametrize(
    ("family", "fields", "message"),
    [
        (
            "llama",
            {"model_type": "bert"},
            "models of type 'bert' do not generate text; --task embed serves",
        ),
        (
            "llama",
            {"architectures": ["LlamaForSequenceClassification"]},
            "generates with LlamaForCausalLM",
        ),
        (
            "llama",
            {"quantization_config": {"quant_method": "awq"}},
            r"quantised \(awq, None bits.*serves",
        ),
        (
            "gpt_oss",
            {"quantization_config": {"quant_method": "mxfp4"}},
            r"quantised \(mxfp4\); the torch engine serves",
        ),
        (
            "llama",
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}},
            "'dynamic'",
        ),
        (
            "llama",
            {"layer_types": ["full_attention", "linear_attention"]},
            "layers of type linear_attention",
        ),
        ("llama", {"dtype": "float64"}, "the checkpoint is float64"),
        ("llama", {"max_position_embeddings": None}, "max_position_embeddings"),
        ("gemma3_text", {"use_bidirectional_attention": True}, "sees later positions"),
        (
            "qwen2_moe",
            {"use_sliding_window": True, "layer_types": ["full_attention", "sliding_attention"]},
            "layer 1 is of type sliding_attention and asks for a window of None",
        ),
    ],
)
def test_what_is_not_served_is_refused_with_the_reason(
    tmp_path: Path, family: str, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        CausalModel.load(
            EngineSettings.of(model=str(changed(family, tmp_path, **fields)), device="cpu")
        )


@pytest.mark.parametrize("model_type", REFUSED)
def test_a_model_that_rows_do_not_describe_is_refused_by_name(model_type: str) -> None:
    with pytest.raises(InvalidRequestError, match=f"'{model_type}': its .*; it serves"):
        family_of({"model_type": model_type})


@pytest.mark.thorough
def test_gemma4_with_inputs_of_each_layer_serves_ids_alone(tmp_path: Path) -> None:
    directory = make(
        "gemma4_text",
        tmp_path,
        layer_types=["sliding_attention", "full_attention"] * 2,
        hidden_size_per_layer_input=8,
        vocab_size_per_layer_input=VOCAB_SIZE,
        num_kv_shared_layers=2,
        attention_k_eq_v=False,
        enable_moe_block=False,
    )
    model = CausalModel.load(EngineSettings.of(model=str(directory), device="cpu", num_threads=1))
    assert model.refuses_rows == PER_LAYER
    engine = core_of(model)
    texts = {"first": ids(1, 50), "again": ids(1, 50), "other": ids(2, 7)}
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    for name, text in texts.items():
        prompt = Prompt.of(Tokens(text))
        outputs = engine.admit(Request(id=name, prompts=(prompt,), params=sampling))
        while len(engine):
            outputs += engine.step()
        found = [id_ for output in outputs for id_ in output.token_ids]
        assert found == reference.greedy_ids(directory, text, NEW), name
    assert engine.stats().cached_tokens > 0


def test_longrope_is_served_within_the_original_context_where_it_is_the_same_for_all(
    tmp_path: Path,
) -> None:
    rope = {
        "rope_type": "longrope",
        "rope_theta": 1e4,
        "short_factor": [1.5] * 8,
        "long_factor": [4.0] * 8,
        "original_max_position_embeddings": 96,
    }
    directory = make("phi3", tmp_path, rope_parameters=rope, original_max_position_embeddings=96)
    with pytest.raises(InvalidRequestError, match="max_model_len 512, allowed: at most 96"):
        CausalModel.load(EngineSettings.of(model=str(directory), device="cpu"))
    model = CausalModel.load(
        EngineSettings.of(model=str(directory), device="cpu", max_model_len=96)
    )
    prompt = ids(6, 95)
    found = next_token(model, Prompt.of(Tokens(prompt)), max_model_len=96)
    expected = expected_logprobs(directory, [prompt], torch.float32)[0]
    for id_, logprob in found.top:
        assert logprob == pytest.approx(expected[id_].item(), abs=1e-4)
