"""Checkpoints with weights of four and eight bits give what their dequantised twins give."""

import json
import shutil
from collections.abc import Callable
from copy import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional as F

from inlay.base.errors import InvalidRequestError
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.checks import check_settings
from inlay.engine.torch.engine import TorchEngine
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native import Products, kernels
from inlay.engine.torch.native.sources import cpu_features
from inlay.engine.torch.step import Core
from inlay.engine.torch.weights import linear
from inlay.engine.torch.weights.linear_methods import QuantisedLinear
from inlay.engine.torch.weights.quantised.formats import Codes
from inlay.engine.torch.weights.quantised.weight import KeptWeight, QuantKind
from inlay.messages.digest import Secret
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output, Request, Sampling
from tests import adapters
from tests.engine import reference
from tests.engine.adapter_conformance import load as load_adapter
from tests.engine.conformance import make_request, run
from tests.equality.reference import model_of
from tests.quantised_models import FORMS, write

IDS = [int(n) for n in torch.randint(3, 250, (40,), generator=torch.Generator().manual_seed(7))]
NEW = 20


def load(directory: Path, dtype: str = "float32") -> CausalModel:
    return CausalModel.load(
        EngineSettings.of(model=str(directory), device="cpu", num_threads=1, dtype=dtype)
    )


def outputs(model: CausalModel, count: int, **options: Any) -> list[Output]:
    bounds = EngineLimits(
        max_model_len=110, max_num_seqs=4, max_num_batched_tokens=32, page_size=16, num_pages=32
    )
    core = Core(model, bounds, Secret(bytes(32)), prefix_caching=True)
    sampling = Sampling(max_tokens=count, temperature=0.0, ignore_eos=True, **options)
    request = Request(id="one", prompts=(Prompt.of(Tokens(IDS)),), params=sampling)
    found = list(core.admit(request))
    while len(core):
        found += core.step()
    return [output for output in found if output.token_ids]


def continued(model: CausalModel) -> list[int]:
    return [id_ for output in outputs(model, NEW) for id_ in output.token_ids]


def random_codes(kind: QuantKind, outputs: int, inputs: int, group: int, zeros: bool) -> Codes:
    generator = torch.Generator().manual_seed(outputs * inputs)
    codes = torch.randint(0, 1 << kind.bits, (outputs, inputs), generator=generator)
    if kind is QuantKind.FP8:
        codes[codes & 127 == 127] = 5  # NaN has a test of its own.
    shape = (outputs, -(-inputs // group))
    return Codes(
        kind,
        codes.to(torch.uint8),
        torch.rand(shape, generator=generator) + 0.1,
        torch.randint(-5, 6, shape, generator=generator, dtype=torch.int32) if zeros else None,
        group,
    )


def defined(codes: Codes) -> Tensor:
    """The weight by its definition, float64 [O, I]."""
    value = {
        QuantKind.INT4: lambda: codes.codes.double() - 8,
        QuantKind.INT8: lambda: codes.codes.view(torch.int8).double(),
        QuantKind.FP8: lambda: codes.codes.view(torch.float8_e4m3fn).double(),
    }[codes.kind]()
    groups = torch.arange(value.shape[1]) // codes.group
    zeros = 0 if codes.zeros is None else codes.zeros[:, groups]
    return (value - zeros) * codes.scales.double()[:, groups]


def products_here(tiles: bool = False) -> Products | None:
    """The compiled products; `tiles`: with tiles, which loops stand for on CPUs that have none."""
    native = kernels()
    if native is None:
        return None
    found = copy(native.products)
    if "amx_bf16" not in cpu_features():
        found.tiles = tiles
    return found


@settings(deadline=None, max_examples=60)
@given(
    kind=st.sampled_from(QuantKind), outputs=st.integers(1, 70), inputs=st.integers(1, 50),
    unit=st.sampled_from([8, 32]), group=st.sampled_from([8, 16, 32, 128, 1024, 2048]),
    zeros=st.booleans(), rows=st.one_of(st.integers(1, 40), st.just(251)),
    way=st.sampled_from(["torch", "native", "tiles"]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
)  # fmt: skip
@example(QuantKind.INT4, 70, 50, 32, 128, True, 13, "native", torch.bfloat16)
@example(QuantKind.INT8, 64, 80, 32, 2048, True, 19, "native", torch.bfloat16)
@example(QuantKind.INT4, 70, 80, 32, 128, True, 60, "tiles", torch.bfloat16)
@example(QuantKind.FP8, 64, 80, 32, 2048, True, 251, "tiles", torch.bfloat16)
def test_a_product_is_that_of_the_exact_values_rounded_once(
    kind: QuantKind, outputs: int, inputs: int, unit: int, group: int, zeros: bool, rows: int, way: str,
    dtype: torch.dtype,
) -> None:  # fmt: skip
    codes = random_codes(kind, outputs, inputs * unit, group, zeros)
    assert codes.fits
    weight = defined(codes)
    torch.testing.assert_close(codes.dense().double(), weight, rtol=1e-6, atol=1e-5)
    torch.testing.assert_close(codes.kept().dense().double(), weight, rtol=1e-5, atol=1e-3)
    bias = torch.randn(outputs, generator=torch.Generator().manual_seed(1)).to(dtype)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(rows, inputs * unit, generator=generator).to(dtype)
    native = None if way == "torch" else products_here(way == "tiles")
    product = QuantisedLinear(codes.kept(), bias, native)
    found = product(x).double()
    expected = F.linear(x.double(), weight, bias.double())
    # float32 sums of the values and of their zeros; in bfloat16 one rounding, and another of each
    # weight that is dequantised first.
    size = x.double().abs() @ (weight.abs() + 16 * codes.scales.double().max()).T
    bound = 1e-6 * size
    if dtype is torch.bfloat16:
        bound = bound + expected.abs() / 256 + (0 if native else size / 256)
    assert bool(((found - expected).abs() <= bound).all())


@pytest.mark.parametrize("zeros", [False, True])
@pytest.mark.parametrize("kind", QuantKind)
def test_what_a_row_gives_does_not_depend_on_the_rows_beside_it(
    kind: QuantKind, zeros: bool
) -> None:
    native = products_here()
    if native is None or not native.pairs:
        pytest.skip("no compiler, or no products of bfloat16, here")
    # More inputs than are widened at once, and more rows than share them.
    codes = random_codes(kind, 56, 1120, 64, zeros).kept()
    product = QuantisedLinear(codes, None, native, invariant=True)
    assert product.invariant
    x = torch.randn(251, 1120).bfloat16()
    whole = product(x)
    for start, rows in ((0, 1), (3, 2), (5, 4), (238, 6), (1, 7), (240, 8), (20, 13), (7, 100)):
        assert torch.equal(product(x[start : start + rows]), whole[start : start + rows])


@pytest.mark.parametrize("tiles", [False, True])
def test_a_product_by_several_threads_is_the_same(tiles: bool) -> None:
    product = QuantisedLinear(
        random_codes(QuantKind.INT8, 200, 256, 64, True).kept(), None, products_here(tiles)
    )
    before = torch.get_num_threads()
    try:
        for rows in (1, 9, 250):
            x = torch.randn(rows, 256).bfloat16()
            torch.set_num_threads(1)
            alone = product(x)
            torch.set_num_threads(3)
            assert torch.equal(product(x), alone)
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("tiles", [False, True])
def test_what_is_not_a_number_stays_so(tiles: bool) -> None:
    native = products_here(tiles)
    if native is None:
        pytest.skip("no compiler here")
    codes = random_codes(QuantKind.FP8, 32, 64, 32, False)
    codes.codes[3, 5] = 127
    product = QuantisedLinear(codes.kept(), None, native)
    for dtype in (torch.float32, torch.bfloat16):
        for rows in (1, 9):
            found = product(torch.ones(rows, 64, dtype=dtype))
            assert bool(found[:, 3].isnan().all())
            assert bool(found[:, :3].isfinite().all())
            of_input = product(torch.full((rows, 64), float("nan"), dtype=dtype))
            assert bool(of_input.isnan().all())


@pytest.mark.parametrize("form", FORMS)
def test_a_published_checkpoint_decodes_as_transformers_does_of_its_values(form: str) -> None:
    quantised, plain = write(form)
    model = load(quantised)
    kept = [each for each in model._model.modules() if isinstance(each, QuantisedLinear)]
    # Two layers: query, key and value in one product, gate and up, output, down. Inputs in an order
    # of their own cannot be shared.
    assert len(kept) == (14 if "ordered" in form else 8) + FORMS[form].head
    assert not [weight for weight in model._model.parameters() if isinstance(weight, KeptWeight)]
    assert continued(model) == reference.greedy(plain, Prompt.of(Tokens(IDS)), NEW)


@pytest.mark.parametrize("form", ["pack-quantized, 4 bits", "awq", "fp8", "int-quantized"])
def test_in_bfloat16_scores_are_as_near_as_those_of_the_values(form: str) -> None:
    quantised, plain = write(form)
    model = load(quantised, "auto")
    assert model.dtype == torch.bfloat16
    native = kernels()
    assert model.batch_invariant == (native is not None and native.invariance_is_free)
    (found,) = [output.logprobs[0] for output in outputs(model, 1, logprobs=20)]
    with torch.no_grad():
        exact = model_of(plain)(torch.tensor([IDS])).logits[0, -1].log_softmax(-1)
    index, values = (torch.tensor(column) for column in zip(*found.top, strict=True))
    # As for the families in bfloat16.
    assert (values - exact[index]).abs().mean() / exact.std() < 0.06


def test_without_native_kernels_the_tokens_are_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    quantised, plain = write("gptq, 4 bits, zeros, ordered")
    monkeypatch.setattr(linear, "kernels", lambda: None)
    monkeypatch.setattr("inlay.engine.torch.model.kernels", lambda: None)
    assert continued(load(quantised)) == reference.greedy(plain, Prompt.of(Tokens(IDS)), NEW)


@pytest.mark.parametrize("form", ["gptq, 4 bits", "pack-quantized, 4 bits, ordered", "fp8"])
async def test_adapters_are_added_and_all_is_the_same_after_sleep(
    form: str, tmp_path: Path
) -> None:
    quantised, plain = write(form)
    settings_ = EngineSettings.of(
        model=str(quantised), device="cpu", num_threads=1, dtype="float32", enable_lora=True,
        max_lora_rank=8, kv_cache_memory_bytes=8 << 20,
    )  # fmt: skip
    path = adapters.make_lora(tmp_path, plain)
    prompt = Prompt.of(Tokens(IDS))
    engine = TorchEngine(settings_, Secret(bytes(32)))
    await engine.start()
    try:
        await load_adapter(engine, "a", path)
        for turn in ("before", "after"):
            with_it, without = await run(
                engine,
                make_request(f"{turn} a", prompt, adapter="a"),
                make_request(turn, prompt),
            )
            assert with_it.output == adapters.greedy(plain, path, prompt, 8)
            assert without.output == reference.greedy(plain, prompt, 8)
            if turn == "before":
                await engine.sleep(1)
                assert await engine.wake_up(())
    finally:
        await engine.close()


def changed(form: str, directory: Path, **fields: Any) -> Path:
    """A copy of a checkpoint with other fields in its `quantization_config`."""
    shutil.copytree(write(form)[0], directory)
    file = directory / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= fields
    file.write_text(json.dumps(config))
    return directory


@pytest.mark.parametrize(
    ("form", "fields", "message"),
    [
        ("awq", {"quant_method": "bitsandbytes"}, "quantised (bitsandbytes); the torch engine"),
        ("awq", {"bits": 3}, "quantised (awq, 3 bits, version gemm)"),
        ("awq", {"version": "gemv"}, "quantised (awq, 4 bits, version gemv)"),
        ("awq", {"group_size": 0}, "quantised (awq, group_size 0)"),
        ("gptq, 4 bits", {"bits": 2}, "quantised (gptq, 2 bits, checkpoint_format gptq)"),
        ("gptq, 4 bits", {"checkpoint_format": "marlin"}, "checkpoint_format marlin"),
        ("int-quantized", {"format": "marlin-24"}, "compressed-tensors, format marlin-24"),
        ("int-quantized", {"config_groups": None}, "compressed-tensors, config_groups None"),
        (
            "int-quantized",
            {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "compressed-tensors, sparsity sparse-24-bitmask",
        ),
        (
            "int-quantized",
            {"config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "float"}}}},
            "compressed-tensors, float of 4 bits",
        ),
    ],
)
def test_another_quantisation_is_refused_by_name_before_anything_is_loaded(
    form: str, fields: dict[str, Any], message: str, tmp_path: Path
) -> None:
    directory = changed(form, tmp_path / "model", **fields)
    (directory / "model.safetensors").unlink()
    with pytest.raises(InvalidRequestError) as refused:
        check_settings(EngineSettings.of(model=str(directory), device="cpu"), directory)
    assert message in refused.value.message
    assert "\n" not in refused.value.message


MODULE = "model.layers.0.mlp.down_proj"


@pytest.mark.parametrize(
    ("form", "change", "message"),
    [
        ("awq", lambda stored: stored.pop(f"{MODULE}.scales"), f"has no {MODULE}.scales"),
        (
            "awq",
            lambda stored: stored.update({f"{MODULE}.qzeros": torch.zeros(2, 8).int()}),
            f"{MODULE}.qzeros is I32 of shape (2, 8); allowed: I32 of shape (4, 8)",
        ),
        (
            "gptq, 4 bits",
            lambda stored: stored.update({f"{MODULE}.g_idx": torch.zeros(128).int()}),
            f"{MODULE}.g_idx does not give 32 inputs to each of 4 groups",
        ),
        (
            "pack-quantized, 4 bits",
            lambda stored: stored.update({f"{MODULE}.weight_shape": torch.tensor([64, 127])}),
            "not 4 or 8 bits in whole words",
        ),
        (
            "pack-quantized, 4 bits",
            lambda stored: stored.update({f"{MODULE}.weight_scale": torch.ones(64, 5)}),
            "which does not divide",
        ),
        (
            "int-quantized",
            lambda stored: stored.update({f"{MODULE}.weight_scale": torch.ones(63, 1)}),
            f"{MODULE}.weight_scale has shape (63, 1), which does not divide",
        ),
    ],
)
def test_a_weight_whose_tensors_do_not_fit_is_refused_by_name(
    form: str, change: Callable[[dict[str, Tensor]], object], message: str, tmp_path: Path
) -> None:
    directory = changed(form, tmp_path / "model")
    stored = load_file(directory / "model.safetensors")
    change(stored)
    save_file(stored, directory / "model.safetensors", {"format": "pt"})
    with pytest.raises(InvalidRequestError) as refused:
        load(directory)
    assert message in refused.value.message
