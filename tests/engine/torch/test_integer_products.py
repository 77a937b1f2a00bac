"""Products in integers have, bit by bit, what their formula says, on every CPU and in any batch."""

import ctypes
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from inlay.engine.torch.native.integers import RUN, IntegerPanels, Integers, integers, quantised
from inlay.engine.torch.native.prebuilt import LEVELS
from inlay.engine.torch.native.sources import SOURCES, compile_for, cpu_features
from inlay.engine.torch.weights.quantised.blocks import BlockWeight
from inlay.tensors.blocks import TYPES, dequantise, six_bit_scales

BLOCKS = [name for name, kind in TYPES.items() if kind.elements > 1]

OUTPUTS = 21


@pytest.fixture(scope="module")
def native() -> Integers:
    found = integers()
    if found is None:
        pytest.skip("no compiler, or no products in integers, here")
    return found


def random_blocks(name: str, outputs: int, inputs: int) -> np.ndarray[Any, Any]:
    """Random bytes, which are valid blocks, with scales of usual sizes: [outputs, blocks, bytes]."""
    kind, rng = TYPES[name], np.random.default_rng(inputs)
    shape = (outputs, inputs // kind.elements)
    raw = rng.integers(0, 256, (*shape, kind.nbytes), np.uint8)
    for at in kind.halves:
        scales = (rng.standard_normal(shape) * 0.01).astype("<f2")
        raw[..., at : at + 2] = scales.view(np.uint8).reshape(*shape, 2)
    if name == "MXFP4":
        raw[..., 0] = rng.integers(0, 140, shape)
    return raw


def half(raw: np.ndarray[Any, Any], at: int) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(raw[..., at : at + 2]).view("<f2")[..., 0].astype(np.float32)


def scales_of(name: str, raw: np.ndarray[Any, Any]) -> tuple[Any, Any]:
    """Scales [O, I / 32], and mins or None: float32, and exact in it."""
    kind, mins = TYPES[name], None
    outputs = len(raw)
    if name == "MXFP4":
        return np.ldexp(np.float32(1), raw[..., 0].astype(int) - 128), None
    scales = half(raw, kind.halves[0])
    if name in ("Q4_K", "Q5_K"):
        own, least = six_bit_scales(raw.reshape(-1, kind.nbytes)[:, 4:16])
        mins = (half(raw, 2).reshape(-1, 1) * least).reshape(outputs, -1)
        scales = (scales.reshape(-1, 1) * own).reshape(outputs, -1)
    elif name == "IQ4_XS":
        high = np.ascontiguousarray(raw[..., 2:4]).view("<u2")
        own = np.repeat(raw[..., 4:8], 2, -1) >> np.tile([0, 4], 4) & 15
        own = own | (high >> np.arange(0, 16, 2) & 3) << 4
        scales = (scales[..., None] * (own.astype(np.float32) - 32)).reshape(outputs, -1)
    elif name in ("Q4_1", "Q5_1"):
        mins = -half(raw, 2)
    elif name == "Q6_K":
        scales = np.repeat(scales, 8, -1)
    return scales, mins


def fma(x: Any, y: Any, z: Any) -> Any:
    wide = x.astype(np.longdouble) * y.astype(np.longdouble) + z.astype(np.longdouble)
    return wide.astype(np.float32)


def by_the_formula(name: str, raw: np.ndarray[Any, Any], x: Tensor, bias: Tensor | None) -> Tensor:
    """Sums of codes as int64, and float32 over blocks in their order."""
    codes_x, scales_x = (part.numpy() for part in quantised(x))
    codes_x = codes_x.astype(np.int64)
    outputs, inputs = len(raw), x.shape[-1]
    scales, mins = scales_of(name, raw)
    values = dequantise(name, raw.reshape(-1), (outputs, inputs)).astype(np.float64)
    values = values.reshape(outputs, -1, 32)
    if mins is not None:
        values = values + mins.astype(np.float64)[..., None]
    # A value is a whole number of its scale; of Q6_K, an integer for 16 times another one.
    with np.errstate(all="ignore"):
        codes = np.where(scales[..., None] == 0, 0, np.rint(values / scales[..., None]))
    codes = codes.astype(np.int64)
    total = np.zeros((len(x), outputs), np.float32)
    for b in range(inputs // 32):
        sums = (codes_x[:, b] @ codes[:, b].T).astype(np.float32) * scales_x[:, b, None]
        total = fma(sums, scales[None, :, b], total)
        if mins is not None:
            own = scales_x[:, b] * codes_x[:, b].sum(-1).astype(np.float32)
            total = fma(own[:, None], -mins[None, :, b], total)
    found = torch.from_numpy(total)
    return (found if bias is None else found + bias.float()).to(x.dtype)


def rows_of(count: int, inputs: int, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(count)
    x = torch.randn(count, inputs, generator=generator)
    x[:, 7] *= 300
    x[0, 32:64] = 0
    x[-1, :32] *= 1e-33
    return x.to(dtype)


def panels_of(native: Integers, name: str, raw: np.ndarray[Any, Any]) -> IntegerPanels:
    kind = TYPES[name]
    inputs = raw.shape[1] * kind.elements
    return native.panels(kind.number, [torch.from_numpy(raw)], len(raw), inputs)


def bits(x: Tensor) -> Tensor:
    return x.view(torch.int32 if x.dtype is torch.float32 else torch.int16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("inputs", [256, 1536])
@pytest.mark.parametrize("name", BLOCKS)
def test_a_product_is_what_the_formula_says_bit_by_bit(
    native: Integers, name: str, inputs: int, dtype: torch.dtype
) -> None:
    raw, x = random_blocks(name, OUTPUTS, inputs), rows_of(19, inputs, dtype)
    bias = torch.linspace(-1, 1, OUTPUTS).to(dtype)
    found = native.product(x, [panels_of(native, name, raw)], bias)
    assert torch.equal(bits(found), bits(by_the_formula(name, raw, x, bias)))


@pytest.mark.parametrize("name", BLOCKS)
def test_a_row_has_the_same_bits_in_any_batch_and_with_any_number_of_threads(
    native: Integers, name: str
) -> None:
    raw, x = random_blocks(name, 40, 512), rows_of(70, 512)
    panels = [panels_of(native, name, raw)]
    alone = torch.cat([native.product(row[None], panels, None) for row in x])
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for count in (*range(1, 20), 70):
                found = native.product(x[:count], panels, None)
                assert torch.equal(bits(found), bits(alone[:count]))
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize("name", ["Q4_K", "Q5_0", "Q6_K", "Q8_0"])
def test_panels_that_are_read_side_by_side_are_what_the_formula_says(
    native: Integers, name: str
) -> None:
    """A few rows take panels of some parts of a thread's share, and what is left over alone."""
    raw, x = random_blocks(name, 200, 256), rows_of(4, 256)
    panels, expected = [panels_of(native, name, raw)], by_the_formula(name, raw, x, None)
    before = torch.get_num_threads()
    try:
        for threads in (1, 2, 3):
            torch.set_num_threads(threads)
            for rows in range(1, 5):
                found = native.product(x[:rows], panels, None)
                assert torch.equal(bits(found), bits(expected[:rows]))
    finally:
        torch.set_num_threads(before)


def test_blocks_that_come_some_rows_at_a_time_are_laid_out_as_those_that_come_at_once(
    native: Integers,
) -> None:
    """Each run is read to where the last one was."""
    raw, kind = torch.from_numpy(random_blocks("Q6_K", 41, 512)).flatten(1), TYPES["Q6_K"]
    memory = torch.empty(RUN, raw.shape[1], dtype=torch.uint8)

    def runs() -> Iterator[Tensor]:
        for run in torch.split(raw, RUN):
            yield memory[: len(run)].copy_(run)

    found = native.panels(kind.number, runs(), 41, 512)
    assert torch.equal(found.data, native.panels(kind.number, [raw], 41, 512).data)
    raw[40, -2:] = torch.tensor([0, 0x7C])
    with pytest.raises(ValueError, match="row 40 "):
        native.panels(kind.number, runs(), 41, 512)


def test_a_large_batch_goes_through_all_panels_in_parts(native: Integers) -> None:
    raw, x = random_blocks("Q4_K", 33, 8960), rows_of(101, 8960)
    panels = [panels_of(native, "Q4_K", raw)]
    alone = torch.cat([native.product(row[None], panels, None) for row in x])
    assert torch.equal(native.product(x, panels, None), alone)


@pytest.mark.parametrize("name", BLOCKS)
def test_rows_of_a_matrix_are_what_its_blocks_stand_for_bit_by_bit(
    native: Integers, name: str
) -> None:
    raw = random_blocks(name, OUTPUTS, 768)
    ids = torch.tensor([20, 0, 3, 3, 16])
    found = native.rows(panels_of(native, name, raw), ids)
    values = torch.from_numpy(dequantise(name, raw.reshape(-1), (OUTPUTS, 768)))
    assert torch.equal(bits(found), bits(values[ids]))


@pytest.mark.parametrize("row", [-1, OUTPUTS, 1 << 40])
def test_a_row_that_a_matrix_does_not_have_is_an_error(native: Integers, row: int) -> None:
    panels = panels_of(native, "Q8_0", random_blocks("Q8_0", OUTPUTS, 64))
    with pytest.raises(IndexError, match=f"row {row} of a matrix of {OUTPUTS}"):
        native.rows(panels, torch.tensor([0, row]))


def test_matrices_of_different_types_are_one_product(native: Integers) -> None:
    made = {name: random_blocks(name, OUTPUTS, 512) for name in ("Q4_K", "Q6_K", "Q5_0", "Q8_0")}
    weights = [BlockWeight((panels_of(native, name, raw),), native) for name, raw in made.items()]
    whole = BlockWeight.joined(weights)
    assert all(one.joins(two) for one in weights for two in weights)
    assert (whole.outputs, whole.inputs) == (4 * OUTPUTS, 512)
    x, bias = rows_of(9, 512), torch.linspace(0, 1, 4 * OUTPUTS)
    found = native.product(x, whole.parts, bias)
    apart = [native.product(x, weight.parts, None) for weight in weights]
    assert torch.equal(found, torch.cat(apart, -1) + bias)
    torch.testing.assert_close(found, whole.product(x, bias), rtol=1e-5, atol=1e-4)
    assert torch.equal(whole.dense(), torch.cat([weight.dense() for weight in weights]))


def test_a_number_that_is_not_finite_makes_its_row_so_and_no_other(native: Integers) -> None:
    panels = [panels_of(native, "Q4_K", random_blocks("Q4_K", OUTPUTS, 512))]
    clean = rows_of(11, 512)
    expected = native.product(clean, panels, None)
    for value in (float("nan"), float("inf"), -float("inf")):
        x = clean.clone()
        x[4, 300] = value
        found = native.product(x, panels, None)
        assert found[4].isnan().all()
        others = [n for n in range(11) if n != 4]
        assert torch.equal(found[others], expected[others])


@pytest.mark.parametrize("name", [name for name in BLOCKS if TYPES[name].halves])
def test_a_scale_that_is_no_number_is_refused_by_its_row(native: Integers, name: str) -> None:
    raw = random_blocks(name, OUTPUTS, 512)
    raw[17, 1, TYPES[name].halves[-1] :][:2] = np.array([np.inf], "<f2").view(np.uint8)
    with pytest.raises(ValueError, match="row 17 has a block whose scale is no finite number"):
        panels_of(native, name, raw)


def test_a_matrix_whose_rows_are_not_whole_blocks_has_no_product(native: Integers) -> None:
    assert native.serves(TYPES["Q8_0"].number, 96)
    assert not native.serves(TYPES["Q4_K"].number, 96)
    assert not native.serves(TYPES["F16"].number, 96)


@pytest.mark.slow
@pytest.mark.parametrize("level", ["v3", "v4", "v4-bf16"])
def test_other_instructions_give_the_same_bits(
    native: Integers, level: str, tmp_path: Path
) -> None:
    """Without products of bytes, and with vectors half as wide: as on a laptop."""
    flags, needed = LEVELS[level]
    compiler = os.environ.get("CXX") or shutil.which("g++")
    if compiler is None or not needed <= cpu_features():
        pytest.skip("not on this CPU, or no compiler")
    library = tmp_path / "integers.so"
    compile_for(compiler, SOURCES / "integers.cpp", library, flags)
    other = Integers(ctypes.CDLL(str(library)))
    for name in BLOCKS:
        raw, x = random_blocks(name, OUTPUTS, 1024), rows_of(13, 1024)
        one, two = (each.product(x, [panels_of(each, name, raw)], None) for each in (native, other))
        assert torch.equal(bits(one), bits(two))
