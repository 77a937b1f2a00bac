"""Experts of GGUF files stay in their blocks, and give what transformers' own code gives."""

from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize, quantize
from safetensors.numpy import load_file, save_file
from torch.nn import functional as F

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.native.integers import integers
from inlay.engine.torch.weights import experts
from inlay.engine.torch.weights.experts import BlockExperts, RouterWeight
from inlay.messages.prompt import Buffer, Rows, Tokens
from inlay.tensors.checkpoint import checkpoint_of
from inlay.tensors.table import EmbeddingTable
from tests.engine.conformance import ids
from tests.engine.torch.test_gguf_blocks import load, logits
from tests.gguf_models import gguf_of, tensors_of
from tests.models import make
from tests.tensors.gguf_files import gguf_bytes

pytestmark = pytest.mark.skipif(integers() is None, reason="no products in integers here")

SIZES: dict[str, dict[str, Any]] = {
    "mixtral": {"hidden_size": 64, "intermediate_size": 96},
    "qwen3_moe": {"hidden_size": 64, "moe_intermediate_size": 32},
    "qwen2_moe": {
        "hidden_size": 64,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "mlp_only_layers": [],
    },
    "gpt_oss": {"hidden_size": 64, "intermediate_size": 64},
}
IDS = Tokens(ids(1, 40))
Array = npt.NDArray[np.float32]


@pytest.fixture(scope="module", params=SIZES)
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The directory of a model."""
    at = tmp_path_factory.mktemp("experts")
    directory: Path = make(request.param, at, **SIZES[request.param])
    return directory


def experts_of(model: Any) -> list[BlockExperts]:
    return [module for module in model.body.modules() if isinstance(module, BlockExperts)]


@pytest.mark.parametrize("kind", ["Q8_0", "MXFP4"])
def test_experts_stay_in_blocks_and_numbers_are_near_the_exact_ones(
    made: Path, tmp_path: Path, kind: str
) -> None:
    file = gguf_of(made, tmp_path / "m.gguf", kind)
    blocks, exact = load(file, self_check="strict"), load(file, activations="exact")
    assert len(experts_of(blocks)) == len(blocks.decoder_layers)
    assert experts_of(exact) == []
    assert not any("experts" in name for name, _ in blocks.body.named_parameters())
    found, expected = logits(blocks, IDS), logits(exact, IDS)
    assert not torch.equal(found, expected)
    clamped = "gpt_oss" in (made / "config.json").read_text()
    assert float((found - expected).norm() / expected.norm()) < (0.1 if clamped else 0.05)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_routers_have_packed_products_and_their_weights(
    made: Path, tmp_path: Path, dtype: str
) -> None:
    model = load(gguf_of(made, tmp_path / "m.gguf", "Q8_0"), dtype=dtype, self_check="strict")
    parts = [part for part in model.body.modules() if type(part).__name__.endswith("TopKRouter")]
    assert len(parts) == len(experts_of(model))
    for part in parts:
        weight, bias = part.weight, getattr(part, "bias", None)
        assert isinstance(weight, RouterWeight)
        x = torch.randn(5, 64, generator=torch.Generator().manual_seed(1)).to(weight.dtype)
        assert torch.equal(F.linear(x, weight, bias), weight.product(x))
        expected = F.linear(x, weight + 0, bias)
        assert type(weight + 0) is torch.Tensor
        assert torch.allclose(weight.product(x), expected, atol=0.02, rtol=2**-7)


def test_exact_numbers_are_those_of_the_dequantised_directory(tmp_path: Path) -> None:
    """GPT-OSS: in the directory, gates and ups are by turns, and inputs come first."""
    directory = make("gpt_oss", tmp_path / "m", **SIZES["gpt_oss"])
    weights = load_file(directory / "model.safetensors")
    rounded = {
        name: _in_mxfp4(values.swapaxes(-1, -2)).swapaxes(-1, -2).copy()
        if ".experts." in name
        else _in_mxfp4(values)
        for name, values in weights.items()
        if not name.endswith("bias") and ".router." not in name and values.ndim > 1
    }
    save_file(weights | rounded, directory / "model.safetensors", metadata={"format": "pt"})
    file = gguf_of(directory, tmp_path / "m.gguf", "MXFP4")
    for dtype in ("float32", "bfloat16"):
        exact = load(file, dtype=dtype, activations="exact", self_check="strict")
        assert torch.equal(logits(exact, IDS), logits(load(directory, dtype=dtype), IDS))


def _in_mxfp4(values: Array) -> Array:
    kind = GGMLQuantizationType.MXFP4
    found: Array = dequantize(quantize(np.ascontiguousarray(values), kind), kind)
    return found


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_of_rows_gives_the_same_numbers_as_its_text(
    made: Path, tmp_path: Path, dtype: str
) -> None:
    file = gguf_of(made, tmp_path / "m.gguf", "MXFP4")
    model = load(file, dtype=dtype)
    values = EmbeddingTable.open(file).rows(IDS.ids[5:20], dtype)
    rows = Rows(Buffer(values.tobytes()), dtype, values.shape)
    mixed = logits(model, Tokens(IDS.ids[:5]), rows, Tokens(IDS.ids[20:]))
    assert torch.equal(mixed, logits(model, IDS))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_what_experts_give_a_row_does_not_depend_on_other_rows(
    made: Path, tmp_path: Path, dtype: torch.dtype
) -> None:
    name = str(dtype).removeprefix("torch.")
    model = load(gguf_of(made, tmp_path / "m.gguf", "Q8_0"), dtype=name)
    module, generator = experts_of(model)[0], torch.Generator().manual_seed(1)
    x = torch.randn(33, 64, generator=generator).to(dtype)
    chosen = torch.stack([torch.randperm(4, generator=generator)[:2] for _ in x])
    weights = torch.rand(33, 2, generator=generator).to(dtype)
    whole = module(x, chosen, weights)
    for rows in (slice(0, 1), slice(7, 8), slice(5, 20)):
        assert torch.equal(module(x[rows], chosen[rows], weights[rows]), whole[rows])


def test_the_gate_of_a_row_does_not_depend_on_other_rows(made: Path, tmp_path: Path) -> None:
    """Wherever threads divide rows among them."""
    module = experts_of(load(gguf_of(made, tmp_path / "m.gguf", "Q8_0")))[0]
    x = torch.randn(331, 2 * 1408, generator=torch.Generator().manual_seed(1))
    before = torch.get_num_threads()
    try:
        for threads in (3, 5, 7):
            torch.set_num_threads(threads)
            assert torch.equal(torch.cat([module._gated(row[None]) for row in x]), module._gated(x))
    finally:
        torch.set_num_threads(before)


def test_experts_of_a_type_without_products_are_dequantised(made: Path, tmp_path: Path) -> None:
    """Of the layers where it is one of the three, and of these all of it."""
    file = gguf_of(made, tmp_path / "m.gguf", "Q8_0")
    metadata = checkpoint_of(file).gguf.metadata  # type: ignore[attr-defined]
    tensors = tensors_of(made, "Q8_0")
    plain = tensors_of(made)["blk.0.ffn_up_exps.weight"]
    file.write_bytes(gguf_bytes(metadata, tensors | {"blk.0.ffn_up_exps.weight": plain}))
    model = load(file, self_check="strict")
    assert len(experts_of(model)) == len(model.decoder_layers) - 1


def test_experts_that_give_something_else_are_left_as_they_are(
    made: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    own = BlockExperts.forward

    def swapped(
        self: BlockExperts, hidden: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor
    ) -> torch.Tensor:
        return own(self, hidden, chosen, weights.flip(-1))

    monkeypatch.setattr(experts.BlockExperts, "forward", swapped)
    model = load(gguf_of(made, tmp_path / "m.gguf", "Q8_0"), self_check="start")
    assert experts_of(model) == []
    assert model.self_check is not None
    assert any(name.endswith(".experts") for name in model.self_check.left_out)
    monkeypatch.undo()
    right = load(gguf_of(made, tmp_path / "n.gguf", "Q8_0"))
    found, expected = logits(model, IDS), logits(right, IDS)
    assert float((found - expected).norm() / expected.norm()) < 1e-3


def test_a_matrix_of_experts_with_a_scale_that_is_no_number_is_named(tmp_path: Path) -> None:
    made = make("mixtral", tmp_path / "m", **SIZES["mixtral"])
    file = gguf_of(made, tmp_path / "m.gguf", "Q8_0")
    metadata = checkpoint_of(file).gguf.metadata  # type: ignore[attr-defined]
    tensors = tensors_of(made, "Q8_0")
    kind, shape, raw = tensors["blk.0.ffn_down_exps.weight"]
    third = bytearray(raw)
    at = len(raw) // 4 * 2
    third[at : at + 2] = b"\x00\x7c"
    tensors["blk.0.ffn_down_exps.weight"] = kind, shape, bytes(third)
    file.write_bytes(gguf_bytes(metadata, tensors))
    name = "model.layers.0.block_sparse_moe.experts.2.w2.weight has scales"
    with pytest.raises(InvalidRequestError, match=name):
        load(file)
