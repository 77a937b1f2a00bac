"""DeepSeek-R1 as it is published.

Fp8 weights in blocks, a layer for multi-token prediction, the fields of its configuration.
"""

import json
import logging
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoConfig

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.step import Core
from inlay.engine.torch.weights.families import check_positions, family_of, next_token_layers
from inlay.engine.torch.weights.quantised.reading import quantised_weights
from inlay.engine.torch.weights.quantised.scheme import Scheme, scheme_of
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output, Request, Sampling
from inlay.tensors.table import EmbeddingTable
from tests.deepseek import by_formula, plain_r1, published, tiny_r1, write
from tests.engine import reference

NEW = 24


def load(directory: Path, dtype: str = "float32") -> CausalModel:
    return CausalModel.load(
        EngineSettings.of(model=str(directory), device="cpu", num_threads=1, dtype=dtype)
    )


def prompts() -> dict[str, Prompt]:
    """All have the same positions."""
    generator = torch.Generator().manual_seed(11)
    ids = torch.randint(3, 350, (70,), generator=generator).tolist()
    rows = reference.rows_of(reference.look_up(plain_r1(), ids))
    return {
        "text": Prompt.of(Tokens(ids)),
        "rows": Prompt.of(rows),
        "mixed": Prompt.of(Tokens(ids[:20]), rows.slice(20, 33), Tokens(ids[33:])),
    }


@cache
def truth() -> list[int]:
    return reference.greedy(plain_r1(), prompts()["text"], NEW)


def continued(model: CausalModel, *, chunk: int = 32) -> dict[str, list[int]]:
    bounds = EngineLimits(
        max_model_len=110, max_num_seqs=8, max_num_batched_tokens=chunk, page_size=16, num_pages=64
    )
    core = Core(model, bounds, Secret(bytes(32)), prefix_caching=True)
    sampling = Sampling(max_tokens=NEW, temperature=0.0, ignore_eos=True)
    outputs: list[Output] = []
    for name, prompt in prompts().items():
        outputs += core.admit(Request(id=name, prompts=(prompt,), params=sampling))
    while len(core):
        outputs += core.step()
    return {
        name: [id_ for output in outputs if output.request_id == name for id_ in output.token_ids]
        for name in prompts()
    }


def test_r1_in_fp8_decodes_as_transformers_does_of_the_dequantised_weights() -> None:
    assert continued(load(tiny_r1())) == dict.fromkeys(prompts(), truth())


def test_in_bfloat16_each_weight_is_the_product_rounded_once() -> None:
    stored = load_file(next(tiny_r1().glob("*.safetensors")))
    model = load(tiny_r1(), "bfloat16")
    assert model.dtype == torch.bfloat16
    weights = dict(model._model.named_parameters())
    name = "model.layers.1.mlp.experts.down_proj"
    experts = [
        by_formula(stored[f"{at}.weight"], stored[f"{at}.weight_scale_inv"])
        for at in (f"model.layers.1.mlp.experts.{index}.down_proj" for index in range(8))
    ]
    assert torch.equal(weights[name], torch.stack(experts).to(torch.bfloat16))


def test_every_weight_is_read_as_the_formula_says() -> None:
    stored = load_file(next(tiny_r1().glob("*.safetensors")))
    scheme = Scheme("fp8", block=(128, 128))
    with quantised_weights(tiny_r1(), scheme, ("model.layers.2.",), None) as weights:
        found = {name: part[...] for name, part in weights.items()}
    expected = {
        name: by_formula(tensor, stored[f"{name}_scale_inv"])
        if tensor.dtype == torch.float8_e4m3fn
        else tensor
        for name, tensor in stored.items()
        if not name.endswith("_scale_inv") and not name.startswith("model.layers.2.")
    }
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())
    # As R1's: four blocks and a half, which blocks of one size would not be.
    assert stored["model.layers.0.self_attn.kv_a_proj_with_mqa.weight_scale_inv"].shape == (5, 2)


def test_the_layer_that_predicts_further_tokens_changes_nothing_and_is_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    without = write(tmp_path / "without", next_token_layer=False)
    with caplog.at_level(logging.INFO, "inlay.engine.torch.weights.checkpoint"):
        assert continued(load(without)) == dict.fromkeys(prompts(), truth())
    assert "predict further tokens" not in caplog.text
    with caplog.at_level(logging.INFO, "inlay.engine.torch.weights.checkpoint"):
        load(tiny_r1())
    assert "model.layers.2.* of the checkpoint, which predict further tokens, are" in caplog.text
    assert EmbeddingTable.open(without).id == EmbeddingTable.open(tiny_r1()).id


def test_the_published_configuration_is_one_this_engine_takes(tmp_path: Path) -> None:
    config = published()
    assert family_of(config).architecture == "DeepseekV3ForCausalLM"
    assert scheme_of(config) == Scheme("fp8", block=(128, 128))
    assert next_token_layers(config) == ("model.layers.61.",)
    (tmp_path / "config.json").write_text(json.dumps(config))
    parsed = AutoConfig.from_pretrained(tmp_path, trust_remote_code=False)
    check_positions(parsed, config["max_position_embeddings"])
    assert (parsed.q_lora_rank, parsed.kv_lora_rank, parsed.n_group, parsed.topk_group) == (
        1536,
        512,
        8,
        4,
    )
    assert (parsed.routed_scaling_factor, parsed.first_k_dense_replace) == (2.5, 3)
    assert parsed.rope_parameters["rope_type"] == "yarn"
    assert (parsed.rope_parameters["factor"], parsed.rope_parameters["mscale_all_dim"]) == (40, 1.0)


@pytest.mark.parametrize(
    ("quantised", "message"),
    [
        ({"quant_method": "fp8"}, "quantised (fp8, weight_block_size None)"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, "weight_block_size [128]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 0]}, "weight_block_size [128, 0]"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128], "fmt": "e5m2"}, "fp8, fmt e5m2"),
        ({"quant_method": "mxfp4"}, "quantised (mxfp4)"),
        ("fp8", "quantization_config is 'fp8', not an object"),
    ],
)
def test_another_way_of_quantising_is_refused_by_name(quantised: Any, message: str) -> None:
    with pytest.raises(InvalidRequestError) as refused:
        scheme_of({"quantization_config": quantised})
    assert message in refused.value.message


WEIGHT = "model.layers.0.mlp.down_proj.weight"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda stored: stored.pop(f"{WEIGHT}_scale_inv"), f"is quantised and has no {WEIGHT}_scale_inv"),
        (
            lambda stored: stored.update({f"{WEIGHT}_scale_inv": torch.ones(2, 1)}),
            "of shape (2, 1); allowed: F32, BF16, F16 of shape (2, 2)",
        ),
        (
            lambda stored: stored.update({f"{WEIGHT}_scale_inv": torch.ones(2, 2, dtype=torch.uint8)}),
            f"{WEIGHT}_scale_inv is U8",
        ),
        (lambda stored: stored.update({WEIGHT: stored[WEIGHT].to(torch.float8_e5m2)}), f"{WEIGHT} is F8_E5M2"),
    ],
    ids=["none", "too few", "not numbers", "another dtype"],
)  # fmt: skip
def test_a_weight_without_its_scales_is_refused_before_anything_is_read(
    tmp_path: Path, change: Callable[[dict[str, Tensor]], object], message: str
) -> None:
    copy = tmp_path / "changed"
    shutil.copytree(tiny_r1(), copy)
    file = next(copy.glob("*.safetensors"))
    stored = load_file(file)
    change(stored)
    save_file(stored, file)
    (copy / "model.safetensors.index.json").unlink()
    with pytest.raises(InvalidRequestError) as refused:
        load(copy)
    assert message in refused.value.message


def test_fp8_that_the_configuration_does_not_speak_of_is_not_read_without_its_scales(
    tmp_path: Path,
) -> None:
    copy = tmp_path / "bare"
    shutil.copytree(tiny_r1(), copy)
    config = json.loads((copy / "config.json").read_text())
    del config["quantization_config"]
    (copy / "config.json").write_text(json.dumps(config))
    with pytest.raises(
        InvalidRequestError, match=r"is F8_E4M3, and config.json has no quantization_config"
    ):
        load(copy)
