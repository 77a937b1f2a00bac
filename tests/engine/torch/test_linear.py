"""Replaced modules compute the same as the originals."""

import logging

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.models.gemma.modeling_gemma import GemmaRMSNorm
from transformers.models.gemma3.modeling_gemma3 import Gemma3RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from inlay.engine.torch.native import Panels, Products, kernels
from inlay.engine.torch.self_check.modules import ModuleCheck
from inlay.engine.torch.weights import linear
from inlay.engine.torch.weights.linear import FusedPart, RMSNorm, accelerate
from inlay.engine.torch.weights.linear_methods import (
    TOLERANCE,
    PackedLinear,
    PlainLinear,
    differ,
    packs,
)

FUSED = (("q_proj", "k_proj", "v_proj"),)


class Attention(nn.Module):
    def __init__(self, biases: tuple[bool, bool, bool] = (False, False, False)) -> None:
        super().__init__()
        self.q_proj = nn.Linear(24, 32, bias=biases[0])
        self.k_proj = nn.Linear(24, 16, bias=biases[1])
        self.v_proj = nn.Linear(24, 8, bias=biases[2])
        self.o_proj = nn.Linear(32, 24)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        query, key, value = self.q_proj(x), self.k_proj(x), self.v_proj(x)
        return query, key, value, self.o_proj(query)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("bias", [True, False])
def test_a_packed_linear_equals_the_plain_one(dtype: torch.dtype, bias: bool) -> None:
    if not packs(dtype):
        pytest.skip(f"no packed linears in {dtype} here")
    original = nn.Linear(40, 56, bias=bias).to(dtype).requires_grad_(False)
    packed = PackedLinear(original.weight, original.bias)
    for shape in ((1, 1, 40), (1, 33, 40), (5, 40)):
        x = torch.randn(shape).to(dtype)
        torch.testing.assert_close(
            packed(x), original(x), atol=1e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2
        )


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("gelu", [True, False])
def test_native_products_equal_those_of_onednn(dtype: torch.dtype, bias: bool, gelu: bool) -> None:
    native = kernels()
    if native is None or not packs(dtype):
        pytest.skip("no packed linears of this dtype, or no compiler, here")
    original = nn.Linear(96, 192, bias=bias).to(dtype).requires_grad_(False)
    fast = PackedLinear(original.weight, original.bias, gelu=gelu, products=native.products)
    slow = PackedLinear(original.weight, original.bias, gelu=gelu)
    assert slow.native_rows == 0
    if native.products.pairs and not native.products.tiles:
        assert bool(fast.native_rows) == (dtype == torch.float32 or not gelu)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    for rows in (1, 2, 4, 5, 31, 64, 65):
        x = torch.randn(1, rows, 96).to(dtype)
        assert fast(x).shape == (1, rows, 192)
        torch.testing.assert_close(fast(x), slow(x), atol=near, rtol=near)


@pytest.mark.parametrize("biases", [(False, False, False), (True, True, True), (True, False, True)])
@pytest.mark.parametrize("packed", [True, False])
def test_fused_projections_equal_separate_ones(
    biases: tuple[bool, bool, bool], packed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = Attention(biases).requires_grad_(False)
    inputs = [torch.randn(1, count, 24) for count in (1, 7, 1)]
    expected = [module(x) for x in inputs]
    if not packed:
        monkeypatch.setattr(linear, "packs", lambda dtype: False)
    accelerate(module, FUSED)
    kinds = [type(child) for child in module.children()]
    assert kinds[:3] == [FusedPart] * 3
    assert kinds[3] == (PackedLinear if packed and packs(torch.float32) else PlainLinear)
    for x, before in zip(inputs, expected, strict=True):
        for found, wanted in zip(module(x), before, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-5, rtol=1e-5)


def test_fused_parts_called_in_any_order_and_again_with_new_input_are_right() -> None:
    module = Attention().requires_grad_(False)
    x, y = torch.randn(1, 2, 24), torch.randn(1, 2, 24)
    expected = {name: (getattr(module, name)(x), getattr(module, name)(y)) for name in FUSED[0]}
    accelerate(module, FUSED)
    for name, which in (
        ("v_proj", 0),
        ("v_proj", 0),
        ("q_proj", 1),
        ("k_proj", 0),
        ("k_proj", 1),
        ("v_proj", 1),
    ):
        torch.testing.assert_close(
            getattr(module, name)((x, y)[which]), expected[name][which], atol=1e-5, rtol=1e-5
        )


def test_originals_are_dropped_and_a_shared_weight_is_not() -> None:
    model = nn.Module()
    model.embed = nn.Embedding(50, 24)
    model.head = nn.Linear(24, 50, bias=False)
    model.head.weight = model.embed.weight
    model.attention = Attention()
    model.requires_grad_(False)
    kept = model.embed.weight
    accelerate(model, FUSED)
    assert model.embed.weight is kept
    x = torch.randn(2, 24)
    torch.testing.assert_close(model.head(x), F.linear(x, kept), atol=1e-5, rtol=1e-5)
    if packs(torch.float32):
        assert [name for name, _ in model.named_parameters()] == ["embed.weight"]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [Qwen3RMSNorm, GemmaRMSNorm])
def test_a_norm_is_swapped_for_a_faster_one_with_the_same_result(
    kind: type[nn.Module], dtype: torch.dtype
) -> None:
    norm = kind(32, eps=1e-5)
    norm.weight.data = torch.randn(32)
    holder = nn.Sequential(norm).to(dtype).requires_grad_(False)
    x = 3 * torch.randn(2, 5, 32).to(dtype)
    expected = holder(x)
    accelerate(holder, ())
    assert isinstance(holder[0], RMSNorm)
    assert holder(x).dtype == dtype
    torch.testing.assert_close(
        holder(x), expected, atol=5e-2 if dtype == torch.bfloat16 else 1e-5, rtol=1e-2
    )


@pytest.mark.parametrize("kind", [Qwen3RMSNorm, Gemma3RMSNorm])
def test_weights_of_hundreds_do_not_hide_which_norm_it_is(kind: type[nn.Module]) -> None:
    """Where weights are large, w and 1 + w are nearly the same but for the small ones."""
    norm = kind(64, eps=1e-6)
    norm.weight.data = 0.05 * torch.randn(64)
    norm.weight.data[[3, 40]] = 608.0
    holder = nn.Sequential(norm).bfloat16().requires_grad_(False)
    x = torch.randn(1, 7, 64).bfloat16()
    expected = holder(x)
    accelerate(holder, ())
    assert isinstance(holder[0], RMSNorm)
    assert differ(holder(x), expected) <= TOLERANCE[torch.bfloat16]
    quiet = [channel for channel in range(64) if channel not in (3, 40)]
    assert differ(holder(x)[..., quiet], expected[..., quiet]) <= TOLERANCE[torch.bfloat16]


def test_an_element_that_is_small_by_chance_rounds_as_its_loud_channel_does() -> None:
    expected = torch.tensor([[0.2, 2.0], [0.3, -2.2], [0.2, 0.013]])
    rounded = expected + torch.tensor([0.0, 0.016])
    assert differ(rounded, expected) < TOLERANCE[torch.bfloat16]
    assert differ(rounded[2:], expected[2:], expected) < TOLERANCE[torch.bfloat16]
    assert differ(rounded[2:], expected[2:]) > TOLERANCE[torch.bfloat16]
    assert differ(rounded.flip(-1), expected) > TOLERANCE[torch.bfloat16]


def test_a_difference_in_quiet_elements_shows_beside_loud_ones() -> None:
    expected = torch.ones(2, 100)
    expected[:, 7] = 1e4
    found = expected.clone()
    found[1, 8] = -1000.0
    assert differ(found, expected) > 0.9
    assert differ(torch.zeros(2, 3), torch.zeros(2, 3)) == 0.0
    assert not differ(torch.full((2, 3), torch.nan), torch.ones(2, 3)) <= 1e9


def _ones(self: Products, x: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
    return x.new_ones(*x.shape[:-1], panels.outputs)


def _last_two_exchanged(self: Products, x: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
    found = _product(self, x, panels, bias)
    last = panels.outputs - 1
    return found[..., [*range(last - 1), last, last - 1]]


def _a_little_too_large(self: Products, x: Tensor, panels: Panels, bias: Tensor | None) -> Tensor:
    return 1.005 * _product(self, x, panels, bias)


_product = Products.product


@pytest.mark.parametrize("wrong", [_ones, _last_two_exchanged, _a_little_too_large])
def test_products_that_differ_beside_a_loud_output_are_left_out(
    wrong: object, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    native = kernels()
    if native is None or not packs(torch.bfloat16) or not native.products.pairs:
        pytest.skip("no native products of bfloat16 here")
    original = nn.Linear(96, 192).bfloat16().requires_grad_(False)
    original.weight[5] *= 800
    right, holder = ModuleCheck(), nn.Sequential(original)
    accelerate(holder, (), None, right)
    assert isinstance(holder[0], PackedLinear)
    assert holder[0].native_rows
    assert (right.checked, right.left_out) == (1, {})
    monkeypatch.setattr(Products, "product", wrong)
    check, holder = ModuleCheck(), nn.Sequential(original)
    with caplog.at_level(logging.WARNING):
        accelerate(holder, (), None, check)
    assert isinstance(holder[0], PlainLinear)
    assert list(check.left_out) == ["0"]
    assert "0 is left as it is: its faster form differs" in caplog.text
    x = torch.randn(1, 96).bfloat16()
    assert torch.equal(holder(x), original(x))


def test_a_norm_of_another_formula_stays() -> None:
    class TwiceRMSNorm(nn.RMSNorm):
        def forward(self, x: Tensor) -> Tensor:
            return 2 * super().forward(x)

    norm = TwiceRMSNorm(32, eps=1e-6)
    norm.weight.data = torch.randn(32)
    holder = nn.Sequential(norm).requires_grad_(False)
    accelerate(holder, ())
    assert holder[0] is norm


def test_packed_linears_that_are_wrong_are_not_used(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    right = PackedLinear.forward
    monkeypatch.setattr(PackedLinear, "forward", lambda self, x: 1.1 * right(self, x))
    with caplog.at_level(logging.WARNING):
        assert not packs(torch.float32)
    assert "not used" in caplog.text


def test_packed_linears_that_do_not_exist_are_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(self: PackedLinear, weight: Tensor, bias: Tensor | None) -> None:
        raise AttributeError("no such operator")

    monkeypatch.setattr(PackedLinear, "__init__", missing)
    assert not packs(torch.float32)
