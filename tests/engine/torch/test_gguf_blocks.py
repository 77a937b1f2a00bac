"""Weights of GGUF files stay in their blocks on a CPU, with activations of eight bits."""

from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.numpy import load_file

from inlay.base.errors import EngineError, InvalidRequestError
from inlay.engine import references
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.attention.pages import Pages
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native import kernels
from inlay.engine.torch.native.integers import integers
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.weights import joint
from inlay.engine.torch.weights.joint import JointBody
from inlay.engine.torch.weights.linear import FusedPart
from inlay.engine.torch.weights.linear_methods import BlockLinear
from inlay.engine.torch.weights.quantised.blocks import BlockWeight
from inlay.engine.torch.weights.quantised.weight import KeptWeight
from inlay.engine.weights import weights_form, weights_id
from inlay.messages.prompt import Buffer, Rows, Segment, Tokens
from inlay.tensors.blocks import TYPES
from inlay.tensors.checkpoint import checkpoint_of
from inlay.tensors.table import EmbeddingTable
from tests.gguf_models import gguf_of, lifelike_in_blocks, llama_in_blocks, tensors_of
from tests.models import tiny
from tests.tensors.gguf_files import gguf_bytes, stored

IDS = [int(n) for n in np.random.default_rng(1).integers(3, 250, 40)]

pytestmark = pytest.mark.skipif(integers() is None, reason="no products in integers here")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return llama_in_blocks(tmp_path_factory.mktemp("whole"))


LIVELY: dict[str, dict[str, Any]] = {
    "llama": {},
    "gemma3_text": {"gemma3.attention.sliding_window_pattern": 2},
}
"""Families, and what their files say besides: layers of Gemma are in two groups of pages."""


@pytest.fixture(scope="module", params=LIVELY)
def lively(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of a lifelike model."""
    at = tmp_path_factory.mktemp("lively")
    return lifelike_in_blocks(request.param, at, **LIVELY[request.param])


@pytest.fixture
def directory(model: tuple[Path, Path]) -> Path:
    return model[0]


@pytest.fixture
def file(model: tuple[Path, Path]) -> Path:
    return model[1]


def load(path: Path, **options: Any) -> CausalModel:
    given: dict[str, Any] = {
        "dtype": "float32",
        "device": "cpu",
        "num_threads": 1,
        "self_check": "off",
    } | options
    return CausalModel.load(EngineSettings.of(model=str(path), **given))


def logits(model: CausalModel, *segments: Segment) -> torch.Tensor:
    """Of the last position."""
    runs = [PageRun(range(1, 5)) for _ in model.page_groups]
    count = sum(len(segment) for segment in segments)
    placed, start = [], 0
    for segment in segments:
        placed.append((start, segment))
        start += len(segment)
    pages: Pages = model.new_pages(4, 16)
    return model.forward(Batch.pack([BatchItem(placed, 0, count, runs, 1)], 16), pages)[0]


def test_all_matrices_stay_in_blocks_and_numbers_are_near_the_exact_ones(file: Path) -> None:
    blocks, exact = load(file), load(file, activations="exact")
    assert not any(isinstance(module, BlockLinear) for module in exact.modules())
    assert sum(isinstance(module, BlockLinear) for module in blocks.modules()) >= 5
    assert isinstance(blocks.embedding.weight, KeptWeight)
    found, expected = logits(blocks, Tokens(IDS)), logits(exact, Tokens(IDS))
    assert not torch.equal(found, expected)
    assert float((found - expected).norm() / expected.norm()) < 0.05


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_prompt_of_rows_gives_the_same_numbers_as_its_text(lively: Path, dtype: str) -> None:
    """Rows as the client looks them up, without the engine."""
    model = load(lively, dtype=dtype)
    values = EmbeddingTable.open(lively).rows(IDS[5:20], dtype)
    rows = Rows(Buffer(values.tobytes()), dtype, values.shape)
    mixed = logits(model, Tokens(IDS[:5]), rows, Tokens(IDS[20:]))
    assert torch.equal(mixed, logits(model, Tokens(IDS)))


def test_matrices_of_one_input_and_of_different_types_are_one_product(
    directory: Path, file: Path, tmp_path: Path
) -> None:
    mixed = tmp_path / "mixed.gguf"
    values = load_file(directory / "model.safetensors")["model.layers.0.self_attn.v_proj.weight"]
    metadata = checkpoint_of(file).gguf.metadata  # type: ignore[attr-defined]
    tensors = tensors_of(directory, "Q8_0") | {"blk.0.attn_v.weight": stored(values, "Q4_0")}
    mixed.write_bytes(gguf_bytes(metadata, tensors))
    model = load(mixed, self_check="strict")
    (layer, *_) = model.decoder_layers
    attention: Any = layer.self_attn
    parts = getattr(attention, "project", None) or attention.v_proj
    product = parts.whole if isinstance(parts, FusedPart) else parts
    assert isinstance(product, BlockLinear)
    assert len(product.weight.parts) == 3
    assert model.self_check is not None
    assert model.self_check.result == "passed"


def test_a_model_in_blocks_can_be_batch_invariant(lively: Path) -> None:
    """Two prompts together are more than one native call takes; alone they are not."""
    native = kernels()
    if native is None or not native.products.pairs:
        pytest.skip("attention is not invariant on this CPU")
    model = load(lively, dtype="bfloat16", batch_invariant=True)
    assert model.batch_invariant
    ends = joint.MOST // 2 + 1, joint.MOST // 2 + 2
    together = _steps(model, ends, (0, 1))
    for place in (0, 1):
        alone = _steps(model, ends, (place,))
        assert all(
            torch.equal(found[place], own[0]) for found, own in zip(together, alone, strict=True)
        )


def test_what_activations_are_is_part_of_the_identity_and_is_said(file: Path) -> None:
    blocks, exact = load(file), load(file, activations="exact")
    assert exact.weights_id == weights_id(file)
    assert blocks.weights_id == weights_id(file, "int8") != weights_id(file)
    assert (blocks.activations, exact.activations) == ("int8", "")
    assert weights_form(file, "float32", "int8") == "GGUF (Q8_0, F32), activations int8"
    assert weights_form(file, "float32") == "GGUF (Q8_0, F32), dequantised to float32"


def test_eight_bits_are_refused_where_there_are_no_blocks(file: Path, tmp_path: Path) -> None:
    plain = gguf_of(tiny("llama"), tmp_path / "f32.gguf")
    for path in (plain, tiny("llama")):
        assert load(path).activations == ""
        with pytest.raises(InvalidRequestError, match=r"int8: the weights of .* not in blocks"):
            load(path, activations="int8")


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_layers_in_one_native_call_give_the_bits_of_their_modules(lively: Path, dtype: str) -> None:
    """Prompts and steps that decode, one sequence and several; a hook has modules run alone."""
    whole, apart = load(lively, dtype=dtype), load(lively, dtype=dtype)
    assert isinstance(whole.body, JointBody)
    ran: list[object] = []
    apart.decoder_layers[0].register_forward_hook(lambda *_: ran.append(None))
    found = [[*_steps(model, ENDS, (0, 1)), *_steps(model, ENDS, (1,))] for model in (whole, apart)]
    assert len(ran) == len(found[0])
    assert whole.body._plan is not None
    assert all(map(torch.equal, *found))


ENDS = (29, 30, 33, 34)
"""Of steps: more than a window, so many that two are one native call, and some that decode."""


def _steps(model: CausalModel, ends: Sequence[int], places: Sequence[int]) -> list[torch.Tensor]:
    """Logits of the prompts at `places` [places, V], in steps that each end so."""
    groups = len(model.page_groups)
    pages, found = model.new_pages(8 * groups, 16), []
    runs = [
        [PageRun(range(4 * at + 1, 4 * at + 5)) for at in range(place, 2 * groups, 2)]
        for place in (0, 1)
    ]
    for first, end in pairwise((0, *ends)):
        items = [
            BatchItem(
                [(first, Tokens(IDS[place:][first:end]))], first, end - first, runs[place], 1,
                decoding=end - first == 1,
            )
            for place in places
        ]  # fmt: skip
        found.append(model.forward(Batch.pack(items, 16), pages))
    return found


def test_a_wrong_product_with_blocks_is_found_in_its_sample_of_rows(file: Path) -> None:
    """The first rows, the middle and the last: what is not sampled has no kernel of its own."""
    native = integers()
    assert native is not None
    blocks = torch.from_numpy(np.random.default_rng(1).integers(0, 60, (1000, 34), np.uint8))
    weight = BlockWeight.of(native, TYPES["Q8_0"].number, [blocks], 1000, 32)
    assert set(weight.sample().tolist()) == {*range(32), *range(500, 532), *range(968, 1000)}
    product = BlockLinear(weight, None)
    for row, right in ((0, False), (31, False), (530, False), (999, False), (300, True)):

        def wrong(x: torch.Tensor, row: int = row) -> torch.Tensor:
            found: torch.Tensor = product(x)
            return found.index_fill(-1, torch.tensor(row), 0.0)

        def expected(x: torch.Tensor) -> torch.Tensor:
            return weight.product(x, None, weight.sample())

        check = ModuleCheck()
        assert (
            check.agrees(["a"], 32, torch.empty(0), wrong, expected, only=weight.sample()) is right
        )


def _with_other_eps(
    plan: Any, norm: Any, x: torch.Tensor, addend: torch.Tensor | None, out: torch.Tensor
) -> Any:
    """As `_Plan._norm`, but norms of a sum have another epsilon."""
    eps = norm.eps if addend is None else 1e3
    call = plan._kernels.norm_call(x, addend, norm.weight, eps, out)
    return plan._named("add_and_norm", call)


@pytest.mark.thorough
def test_layers_in_one_native_call_that_differ_are_left_as_modules(
    lively: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    # No other start is known.
    monkeypatch.setattr(references, "_path", lambda key: tmp_path / key)
    with monkeypatch.context() as context:
        context.setattr(joint._Plan, "_norm", _with_other_eps)
        with pytest.raises(EngineError, match=r"strict: layers in one call of this model differ"):
            load(lively, self_check="strict")
        found = load(lively, self_check="start")
        assert "layers in one call" in caplog.text
        # A later start knows it.
        later = load(lively, self_check="start")
        apart = load(lively)
        apart.decoder_layers[0].register_forward_hook(lambda *_: None)
        wanted = _steps(apart, ENDS, (0, 1))
        for model in (found, later):
            assert model.self_check is not None
            assert (model.self_check.result, model.self_check.left_out) == (
                "reduced",
                (joint.NAME,),
            )
            assert all(map(torch.equal, _steps(model, ENDS, (0, 1)), wanted))
    right = load(lively, self_check="full")
    assert len(right.page_groups) > 1 or "llama" in type(right._model).__name__.lower()
    assert right.self_check is not None
    assert right.self_check.result == "passed"
    assert isinstance(right.body, JointBody)
    # It ran at the start.
    assert right.body._plan is not None
    assert not right.body.proven
    # A later start of the same code on this CPU knows it.
    later = load(lively, self_check="start")
    assert isinstance(later.body, JointBody)
    assert later.body.proven
    assert later.self_check is not None
    assert later.self_check.result == "passed"
