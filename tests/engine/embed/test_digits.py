"""Float32 products of three signed bytes, against float64, on CPUs with tiles and without."""

import ctypes
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from inlay.engine.embed.native_layers import MOST_INPUTS, _digits
from inlay.engine.torch.native import sources
from tests.engine.embed.test_native_layers import WITHOUT_TILES

Product = Callable[[Tensor, Tensor], Tensor]
BOUND = 2.0**-20
"""Largest error, in units of inputs times the largest of the row times that of the column."""


@pytest.fixture(scope="module", params=["this CPU", "no tiles"])
def product(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Product:
    compiler = os.environ.get("CXX") or shutil.which("g++") or shutil.which("clang++")
    assert compiler is not None
    machine = ["-march=native", f"-I{sources.SOURCES}"]
    if request.param == "no tiles" and "-mprefer-vector-width=512" in sources.FLAGS:
        machine += WITHOUT_TILES
    path = tmp_path_factory.mktemp("digits") / "digits.so"
    sources.compile_for(compiler, Path(__file__).with_name("digits.cpp"), path, tuple(machine))
    library = ctypes.CDLL(str(path))
    library.product_bytes.restype = ctypes.c_int64
    library.product_bytes.argtypes = [ctypes.c_int64] * 2
    library.product.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_int64] * 3

    def run(x: Tensor, weight: Tensor) -> Tensor:
        (rows, inputs), outputs = x.shape, len(weight)
        packed, x, out = _digits(weight), x.contiguous(), torch.empty(rows, outputs)
        memory = torch.empty(library.product_bytes(rows, inputs), dtype=torch.uint8)
        library.product(
            x.data_ptr(), packed.data_ptr(), out.data_ptr(), memory.data_ptr(), rows, inputs, outputs
        )  # fmt: skip
        return out

    return run


def normal(*sizes: int) -> Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(sizes[0]))


def error(found: Tensor, x: Tensor, weight: Tensor) -> Tensor:
    """Return errors in units of what the bound is stated in."""
    exact = x.double() @ weight.double().T
    tops = x.double().abs().amax(1)[:, None] * weight.double().abs().amax(1)
    return (found.double() - exact).abs() / (tops * x.shape[1])


@pytest.mark.parametrize("inputs", [32, 96, 384, 1536])
def test_a_product_is_as_exact_as_one_of_float32(product: Product, inputs: int) -> None:
    x, weight = normal(37, inputs), normal(48, inputs)
    found, plain = (error(y, x, weight) for y in (product(x, weight), x @ weight.T))
    assert found.max() < 2 * plain.max()
    assert found.max() < BOUND / 8


def test_the_bound_holds_for_rows_and_columns_of_any_magnitude(product: Product) -> None:
    x, weight = normal(40, 96), normal(64, 96)
    x *= 10.0 ** torch.linspace(-14, 15, 40)[:, None]
    weight *= 10.0 ** torch.linspace(-14, 18, 64)[:, None]
    # And for elements of one row.
    x[::2] *= 10.0 ** torch.linspace(-12, 0, 96)
    assert error(product(x, weight), x, weight).max() < BOUND


def test_the_bound_holds_where_all_sums_are_largest(product: Product) -> None:
    for value in (-1.0, 1 - 2.0**-9):
        x, weight = torch.full((3, MOST_INPUTS), value), torch.full((16, MOST_INPUTS), -value)
        x[:, 0], weight[:, 0] = 1, 1
        assert error(product(x, weight), x, weight).max() < BOUND


def test_a_row_of_denormals_or_zeros_gives_zero(product: Product) -> None:
    x = torch.stack([torch.full((96,), value) for value in (0.0, 1e-40, -1e-31, 1.0)])
    found = product(x, normal(16, 96))
    assert not found[:3].any()
    assert found[3].all()
    assert not product(x, torch.full((16, 96), 1e-40))[:3].any()


@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_a_row_that_is_not_finite_gives_nan_alone(product: Product, poison: float) -> None:
    x, weight = normal(20, 96), normal(32, 96)
    clean = product(x, weight)
    x[7, 50] = poison
    x[11] = poison
    found = product(x, weight)
    others = [row for row in range(20) if row not in (7, 11)]
    assert found[[7, 11]].isnan().all()
    assert torch.equal(found[others], clean[others])
    weight[3, 2] = poison
    assert not product(x, weight)[:, 3].isfinite().any()
