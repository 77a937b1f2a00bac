"""`--quantization`: weights of a plain checkpoint are rounded to GGUF's blocks as it is loaded."""

import math
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native.integers import integers
from inlay.engine.torch.quality import quality_of
from inlay.engine.torch.weights.experts import BlockExperts
from inlay.engine.torch.weights.linear_methods import BlockLinear
from inlay.engine.torch.weights.quantised.rounding import q4_k, q8_0
from inlay.messages.prompt import Buffer, Rows, Tokens
from inlay.tensors.blocks import dequantise
from inlay.tensors.table import EmbeddingTable
from tests.engine.torch.test_gguf_blocks import IDS, load, logits
from tests.gguf_models import gguf_of
from tests.models import make

pytestmark = pytest.mark.skipif(integers() is None, reason="no products in integers here")


@pytest.fixture(scope="module", params=[False, True], ids=["head", "tied"])
def directory(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Llama with matrices of 256 and of 96 inputs."""
    sizes: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 96}
    heads: dict[str, Any] = {"num_attention_heads": 4, "num_key_value_heads": 2}
    path = tmp_path_factory.mktemp("plain")
    return make("llama", path, **sizes, **heads, tie_word_embeddings=request.param)


def back(name: str, raw: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    return torch.from_numpy(dequantise(name, raw.numpy(), tuple(like.shape)))


def test_blocks_of_eight_bits_are_off_by_half_a_step_at_most() -> None:
    values = torch.randn(5, 96, generator=torch.Generator().manual_seed(1)) * 3
    found = back("Q8_0", q8_0(values), values).view(5, -1, 32)
    blocks = values.view(5, -1, 32)
    step = blocks.abs().amax(-1, keepdim=True) / 127
    # Half a step, and the scale's rounding to float16.
    assert bool(((found - blocks).abs() <= step * (0.5 + 127 * 2**-11)).all())


def test_blocks_of_four_bits_are_as_near_as_the_format_allows() -> None:
    values = torch.randn(64, 512, generator=torch.Generator().manual_seed(1))
    for shifted in (values, values + 1, values.abs(), -values.abs()):
        found = back("Q4_K", q4_k(shifted), shifted)
        # 15 steps over the range of 32 normal numbers; 0.08 is its rounding with ends kept.
        assert float((found - shifted).norm() / values.norm()) < 0.08


@pytest.mark.parametrize("encode", [q8_0, q4_k])
def test_zeros_stay_zeros(encode: Any) -> None:
    name = {q8_0: "Q8_0", q4_k: "Q4_K"}[encode]
    zeros = torch.zeros(2, 256)
    assert torch.equal(back(name, encode(zeros), zeros), zeros)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize(("quantization", "most"), [("int8", 0.05), ("q4_k", 0.4)])
def test_a_model_is_rounded_and_passes_its_self_check(
    directory: Path, quantization: str, most: float, dtype: str
) -> None:
    plain = load(directory, dtype=dtype)
    model = load(directory, quantization=quantization, self_check="strict", dtype=dtype)
    assert model.self_check is not None
    assert model.self_check.result == "passed"
    # Activations of eight bits are as coarse in float32: a code rounded otherwise is no fault.
    assert model.self_check.noise > 2**-8
    assert not any(isinstance(module, BlockLinear) for module in plain.modules())
    assert any(isinstance(module, BlockLinear) for module in model.modules())
    found, expected = logits(model, Tokens(IDS)), logits(plain, Tokens(IDS))
    assert not torch.equal(found, expected)
    assert float((found - expected).norm() / expected.norm()) < most
    assert model.weights_id != plain.weights_id


@pytest.mark.parametrize("family", ["gemma4_text", "qwen2_moe", "qwen3_next", "qwen3_moe"])
def test_routers_of_experts_stay_as_they_are(family: str, tmp_path: Path) -> None:
    path = make(family, tmp_path, dtype="bfloat16")
    plain = {name: type(module) for name, module in named(load(path, dtype="bfloat16"))}
    found = dict(named(load(path, dtype="bfloat16", quantization="int8")))
    routers = [
        name for name in plain if re.search(r"\.(router\.proj|(shared_expert_)?gate)$", name)
    ]
    assert routers
    assert {name: type(found[name]) for name in routers} == {name: plain[name] for name in routers}
    assert any(isinstance(module, BlockLinear) for module in found.values())


@pytest.mark.parametrize("family", ["mixtral", "qwen3_moe"])
def test_experts_are_rounded_as_linear_layers_are(family: str, tmp_path: Path) -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "moe_intermediate_size": 32}
    path = make(family, tmp_path, **(sizes if family == "qwen3_moe" else {}))
    plain, model = load(path), load(path, quantization="int8", self_check="strict")
    experts = [module for _, module in named(model) if isinstance(module, BlockExperts)]
    assert len(experts) == len(model.decoder_layers)
    found, expected = logits(model, Tokens(IDS)), logits(plain, Tokens(IDS))
    assert not torch.equal(found, expected)
    assert float((found - expected).norm() / expected.norm()) < 0.1


def named(model: CausalModel) -> Iterator[tuple[str, nn.Module]]:
    yield from model._model.named_modules()


def test_the_two_roundings_are_different_weights(directory: Path) -> None:
    ids = {load(directory, quantization=each).weights_id for each in ("int8", "q4_k")}
    assert len(ids) == 2


def test_rows_of_the_files_table_give_the_same_numbers_as_the_text(directory: Path) -> None:
    """A tied head is rounded, and the table is not."""
    model = load(directory, quantization="int8")
    values = EmbeddingTable.open(directory).rows(IDS[5:20], "float32")
    rows = Rows(Buffer(values.tobytes()), "float32", values.shape)
    mixed = logits(model, Tokens(IDS[:5]), rows, Tokens(IDS[20:]))
    assert torch.equal(mixed, logits(model, Tokens(IDS)))


def test_what_cannot_be_rounded_is_refused_by_name(directory: Path, tmp_path: Path) -> None:
    with pytest.raises(InvalidRequestError, match=r"--quantization int8: .*--activations exact"):
        load(directory, quantization="int8", activations="exact")
    file = gguf_of(directory, tmp_path / "m.gguf", "Q8_0")
    with pytest.raises(InvalidRequestError, match=r"--quantization q4_k: .*is GGUF"):
        load(file, quantization="q4_k")


def test_the_loss_on_a_text_is_measured(directory: Path) -> None:
    settings = EngineSettings.of(
        model=str(directory), device="cpu", dtype="float32", self_check="off", num_threads=1,
        max_model_len=512, quantization="int8",
    )  # fmt: skip
    found = quality_of(settings, [IDS, IDS[::-1]])
    assert found.tokens == 2 * (len(IDS) - 1)
    assert found.rounding == "int8, weights int8"
    coarse = quality_of(settings.replace(quantization="q4_k"), [IDS, IDS[::-1]])
    assert 0 < found.divergence < coarse.divergence
    assert math.log(found.rounded) == pytest.approx(math.log(found.exact), rel=0.02)
    with pytest.raises(InvalidRequestError, match="nothing is rounded"):
        quality_of(settings.replace(quantization=None), [IDS])
