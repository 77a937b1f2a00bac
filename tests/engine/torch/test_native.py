"""Native kernels agree with torch, keep NaN and infinity, and are optional."""

import logging
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from inlay.engine.settings import EngineSettings
from inlay.engine.torch import model as model_module
from inlay.engine.torch.batch import Batch, BatchItem
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.native import Kernels, Panels, kernels
from inlay.engine.torch.native.build import load
from inlay.engine.torch.weights.fused import FusedAttention, FusedGated
from inlay.messages.prompt import Tokens
from tests.models import make

TOLERANCE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
DTYPES = list(TOLERANCE)


@pytest.fixture
def native() -> Kernels:
    compiled = kernels()
    assert compiled is not None, "these tests need a C++ compiler"
    return compiled


def near(found: Tensor, expected: Tensor) -> None:
    tolerance = TOLERANCE[found.dtype]
    torch.testing.assert_close(
        found.double(), expected.double(), atol=tolerance, rtol=tolerance, equal_nan=True
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 3, 40])
def test_a_norm_is_torchs_norm(native: Kernels, dtype: torch.dtype, rows: int) -> None:
    x, weight = torch.randn(2, rows, 37).to(dtype), torch.randn(37)
    near(native.rms_norm(x, weight, 1e-5), F.rms_norm(x.double(), (37,), weight.double(), 1e-5))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("gelu", [False, True])
def test_a_gated_unit_is_an_activation_of_the_gate_times_the_other(
    native: Kernels, dtype: torch.dtype, rows: int, gelu: bool
) -> None:
    gate, up = 20 * torch.randn(rows, 19), torch.randn(rows, 19)
    gate[0, :4] = torch.tensor([-200.0, 200.0, -88.5, 0.0])
    both = torch.cat([gate, up], 1).to(dtype)
    gates, ups = both.double().tensor_split(2, 1)
    activated = F.gelu(gates, approximate="tanh") if gelu else F.silu(gates)
    near(native.multiply(both, gelu=gelu), activated * ups)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 40])
def test_a_clamped_gate_is_that_of_gpt_oss(native: Kernels, dtype: torch.dtype, rows: int) -> None:
    both = 10 * torch.randn(rows, 38)
    both[0, :6] = torch.tensor([-200.0, 200.0, 200.0, -200.0, 7.0, -7.0])
    both[-1, 31] = float("nan")
    both = both.to(dtype)
    found, exact = native.clamped_gate(both, 1.702, 7.0), both.double()
    gate, up = exact[:, ::2].clamp(max=7), exact[:, 1::2].clamp(-7, 7)
    assert found.isnan().nonzero().tolist() == [[rows - 1, 15]]
    near(found.nan_to_num(), ((up + 1) * gate * (1.702 * gate).sigmoid()).nan_to_num())


def packed_by_hand(weight: Tensor, width: int) -> tuple[Tensor, Panels]:
    """A weight [O, I] laid out as oneDNN does, [O / width, I / n, width, n], n of 4 bytes."""
    outputs, inputs = weight.shape
    beside = 4 // weight.dtype.itemsize
    laid = weight.view(outputs // width, width, inputs // beside, beside).transpose(1, 2)
    laid = laid.contiguous()
    return laid, Panels(laid.data_ptr(), outputs, inputs, width, weight.dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("panels", [1, 2, 5])
@pytest.mark.parametrize("bias", [True, False])
def test_a_product_with_a_packed_weight_is_the_product(
    native: Kernels, dtype: torch.dtype, width: int, panels: int, bias: bool
) -> None:
    weight = torch.randn(panels * width, 96).to(dtype)
    extra = torch.randn(panels * width).to(dtype) if bias else None
    laid, packed = packed_by_hand(weight, width)
    near = 1e-5 if dtype == torch.float32 else 1e-2
    for rows in (1, 2, 3, 4, 5, 16, 17, 32, 33, 64, 250):
        if rows > native.products.product_rows(packed):
            continue
        x = torch.randn(rows, 96).to(dtype)
        found = native.products.product(x, packed, extra)
        expected = F.linear(x.double(), weight.double(), None if extra is None else extra.double())
        torch.testing.assert_close(found.double(), expected, atol=near, rtol=near)
        assert torch.equal(found, native.products.product(x[None], packed, extra)[0])
    del laid


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", [1, 4, 20])
@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_what_is_not_finite_stays_in_its_row_of_a_product(
    native: Kernels, dtype: torch.dtype, rows: int, bad: float
) -> None:
    laid, packed = packed_by_hand(torch.randn(32, 64).to(dtype), 32)
    if rows > native.products.product_rows(packed):
        pytest.skip("no products of so many rows here")
    x = torch.randn(rows, 64).to(dtype)
    clean = native.products.product(x, packed, None)
    x[rows - 1, 7] = bad
    found = native.products.product(x, packed, None)
    assert not torch.isfinite(found[-1]).any()
    assert torch.equal(found[:-1], clean[:-1])
    del laid


@pytest.mark.parametrize("inputs", [96, 8192], ids=["short", "too long for all rows at once"])
@pytest.mark.parametrize("width", [32, 64])
@pytest.mark.parametrize("bias", [False, True])
def test_a_row_of_a_product_has_the_same_bits_whatever_rows_are_beside_it(
    native: Kernels, width: int, bias: bool, inputs: int
) -> None:
    laid, packed = packed_by_hand(torch.randn(3 * 64, inputs).bfloat16(), width)
    if not native.products.invariant_product(packed):
        pytest.skip("no products of pairs here, or no tiles for panels of this width")
    x = torch.randn(601, inputs).bfloat16()
    added = torch.randn(192).bfloat16() if bias else None
    whole = native.products.product(x, packed, added)
    for start, rows in (
        (0, 1),
        (7, 2),
        (1, 3),
        (3, 4),
        (600, 1),
        (5, 6),
        (11, 7),
        (8, 33),
        (90, 250),
    ):
        part = native.products.product(x[start : start + rows], packed, added)
        assert torch.equal(part, whole[start : start + rows])
    del laid


def test_a_product_by_several_threads_is_the_same(native: Kernels) -> None:
    weight = torch.randn(7 * 32, 64).bfloat16()
    laid, packed = packed_by_hand(weight, 32)
    before = torch.get_num_threads()
    try:
        most = min(500, native.products.product_rows(packed))
        for rows in (1, 4, min(20, most), most):
            x = torch.randn(rows, 64).bfloat16()
            torch.set_num_threads(1)
            alone = native.products.product(x, packed, None)
            torch.set_num_threads(3)
            assert torch.equal(native.products.product(x, packed, None), alone)
    finally:
        torch.set_num_threads(before)
    del laid


@given(
    rows=st.integers(1, 3).flatmap(
        lambda count: st.lists(
            st.lists(
                st.one_of(st.floats(width=32), st.sampled_from([0.0, -0.0, 1.0, -1.0])),
                min_size=1, max_size=40,
            ),
            min_size=count, max_size=count,
        )
    ),
    fill=st.sampled_from([0, 1000, 3000]),
    dtype=st.sampled_from(DTYPES),
)  # fmt: skip
def test_the_greatest_is_the_one_torch_names(
    rows: list[list[float]], fill: int, dtype: torch.dtype
) -> None:
    native = kernels()
    assert native is not None
    width = fill + max(map(len, rows))
    values = torch.full((len(rows), width), float("-inf"), dtype=dtype)
    for row, entries in zip(values, rows, strict=True):
        row[width - len(entries) :] = torch.tensor(entries)
    found, expected = native.argmax(values), values.argmax(-1)
    picked = values.gather(1, found[:, None]), values.gather(1, expected[:, None])
    torch.testing.assert_close(*picked, atol=0, rtol=0, equal_nan=True)
    for row, index in zip(values, found.tolist(), strict=True):
        assert not (row[:index] == row[index]).any() or row[index] == 0


@pytest.mark.parametrize("dtype", DTYPES)
@given(
    entries=st.lists(st.floats(width=16), min_size=1, max_size=40),
    others=st.sampled_from([0, 64, 2000]),
)
def test_rows_are_finite_where_torch_says_so(
    dtype: torch.dtype, entries: list[float], others: int
) -> None:
    native = kernels()
    assert native is not None
    values = torch.full((3, others + len(entries)), torch.finfo(dtype).max, dtype=dtype)
    values[1, others:] = torch.tensor(entries)
    values[2] *= -1
    assert native.finite(values).tolist() == values.isfinite().all(-1).tolist()


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("dtype", DTYPES)
def test_what_is_not_finite_stays_so(native: Kernels, bad: float, dtype: torch.dtype) -> None:
    x = torch.ones(2, 32, dtype=dtype)
    x[1, 5] = bad
    normed = native.rms_norm(x, torch.ones(32), 1e-5).float()
    assert normed[0].isfinite().all()
    assert not normed[1].isfinite().all()
    for gelu in (False, True):
        for pair in ([torch.ones_like(x), x], [x, torch.ones_like(x)]):
            gated = native.multiply(torch.cat(pair, 1), gelu=gelu).float()
            assert gated[0].isfinite().all()
            assert not gated[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("positions", [1, 5, 33])
@pytest.mark.parametrize("normed", [True, False])
def test_queries_and_keys_are_normed_turned_and_stored(
    native: Kernels, dtype: torch.dtype, positions: int, normed: bool
) -> None:
    heads, query_heads, size, rotated, stored = 2, 4, 16, 12, max(1, positions - 2)
    projected = torch.randn(positions, (query_heads + 2 * heads) * size).to(dtype)
    cosine, sine = torch.randn(2, positions, rotated).to(dtype).unbind()
    norms = (torch.randn(size), torch.randn(size))
    keys, values = (torch.full((heads, 3, 16, size), 7.0, dtype=dtype) for _ in range(2))
    slots = torch.randperm(48)[:stored]

    query = projected.new_empty(positions, query_heads, size)
    call = native.prepare_call(
        projected, cosine, sine, norms if normed else None, 1e-6, slots, keys, values, query
    )
    native.prepare(dtype, call)

    def turned(states: Tensor, norm: Tensor) -> Tensor:
        states = F.rms_norm(states, (size,), norm.double(), 1e-6) if normed else states
        halves = torch.cat([-states[..., rotated // 2 : rotated], states[..., : rotated // 2]], -1)
        moved = states[..., :rotated] * cosine.double()[:, None] + halves * sine.double()[:, None]
        return torch.cat([moved, states[..., rotated:]], -1)

    every = projected.double().view(positions, -1, size)
    parts = every[:, :query_heads], every[:, query_heads:-heads], every[:, -heads:]
    near(query, turned(parts[0], norms[0]))
    near(keys.view(heads, 48, size)[:, slots], turned(parts[1], norms[1])[:stored].transpose(0, 1))
    assert torch.equal(
        values.view(heads, 48, size)[:, slots].double(), parts[2][:stored].transpose(0, 1)
    )
    others = torch.ones(48, dtype=torch.bool).index_fill_(0, slots, False)
    assert (keys.view(heads, 48, size)[:, others] == 7).all()


@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3"])
def test_fused_layers_compute_what_the_models_own_do(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    directory = make(family, tmp_path / family)
    settings = EngineSettings.of(model=str(directory), dtype="float32", device="cpu")
    fused = CausalModel.load(settings)
    monkeypatch.setattr(model_module, "fuse", lambda *_: None)
    plain = CausalModel.load(settings)
    kinds = [{type(part) for part in each._model.modules()} for each in (fused, plain)]
    assert {FusedAttention, FusedGated} <= kinds[0]
    assert not {FusedAttention, FusedGated} & kinds[1]

    ids = [5, 9, 3, 44, 2, 17, 8]
    stretches = [
        BatchItem([(0, Tokens(ids))], 0, len(ids), [PageRun([2])], True),
        BatchItem([(0, Tokens(ids[:1]))], 0, 1, [PageRun([1])], True),
    ]
    batch = Batch.pack(stretches, 16)
    logits = [each.forward(batch, each.new_pages(2, 16)) for each in (fused, plain)]
    torch.testing.assert_close(logits[0], logits[1], atol=1e-4, rtol=1e-4)


def test_a_compiler_that_fails_is_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    compiler = tmp_path / "c++"
    compiler.write_text('#!/bin/sh\ntest "$1" = --version\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("CXX", str(compiler))
    with caplog.at_level(logging.INFO):
        assert load("kernels") is None
    assert "compiling kernels.cpp" in caplog.text
    assert "native kernels are not used" in caplog.text
    assert not list((tmp_path / "inlay" / "kernels").iterdir())


def test_no_compiler_is_done_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CXX", raising=False)
    monkeypatch.setenv("PATH", str(tmp_path))
    assert load("kernels") is None


@pytest.mark.thorough
def test_a_user_without_a_home_has_kernels_for_this_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.setattr("os.path.expanduser", lambda path: path)
    found = load("kernels")
    assert found is not None
    # Loaded, and gone.
    assert not Path(found._name).exists()


@pytest.mark.thorough
def test_kernels_in_a_directory_others_may_write_to_are_not_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    directory = tmp_path / "inlay" / "kernels"
    directory.mkdir(parents=True)
    directory.chmod(0o777)
    found = load("kernels")
    assert found is not None
    assert directory not in Path(found._name).parents
    assert list(directory.iterdir()) == []


@pytest.mark.thorough
def test_kernels_are_compiled_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert load("kernels") is not None
    (path,) = (tmp_path / "inlay" / "kernels").iterdir()
    made = path.stat().st_mtime_ns
    assert load("kernels") is not None
    assert path.stat().st_mtime_ns == made
