"""From a tensor to rows.

Casts as torch makes them, checks before and after, no copy where none is needed.
"""

import tracemalloc
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from inlay.base.errors import EmbeddingsError
from inlay.messages.prompt import Buffer
from inlay.tensors import ReadLimits, Tensor, prompts_of, read, to_rows, write
from inlay.tensors.cast import first_at_least, largest_magnitude
from tests.examples import examples
from tests.tensors.hostile import saved

SOURCES = ("float64", "float32", "float16", "bfloat16", "float8_e4m3fn", "float8_e5m2")
TARGETS = ("bfloat16", "float16", "float32")
SIZES = {
    "float64": 8,
    "float32": 4,
    "float16": 2,
    "bfloat16": 2,
    "float8_e4m3fn": 1,
    "float8_e5m2": 1,
}


def of(values: torch.Tensor, table_id: str | None = None) -> Tensor:
    data = values.contiguous().view(torch.uint8).numpy().tobytes()
    return Tensor(
        Buffer(data),
        str(values.dtype).removeprefix("torch."),
        tuple(values.shape),
        "torch",
        table_id,
    )


def rows_of(values: torch.Tensor, dtype: str, **options: Any) -> torch.Tensor:
    rows = to_rows(of(values), hidden_size=values.shape[1], dtype=dtype, **options)
    assert rows.dtype == dtype
    assert rows.digests is None
    return torch.frombuffer(bytearray(rows.data.view), dtype=getattr(torch, dtype)).reshape(
        rows.shape
    )


def same_bits(one: torch.Tensor, other: torch.Tensor) -> bool:
    return torch.equal(one.contiguous().view(torch.uint8), other.contiguous().view(torch.uint8))


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", SOURCES)
def test_the_same_memory_or_torchs_values(source: str, target: str) -> None:
    values = torch.randn(300, 1024, generator=torch.Generator().manual_seed(3)).to(
        getattr(torch, source)
    )
    tensor = of(values)
    rows = to_rows(tensor, hidden_size=1024, dtype=target)
    assert same_bits(rows_of(values, target), values.float().to(getattr(torch, target)))
    assert (rows.data is tensor.data) == (source == target)


@pytest.mark.parametrize("target", TARGETS)
@pytest.mark.parametrize("source", [name for name in SOURCES if SIZES[name] <= 2])
def test_every_value_of_a_narrow_dtype_casts_as_in_torch(source: str, target: str) -> None:
    size = SIZES[source]
    patterns = (
        torch.arange(256**size)
        .to({1: torch.uint8, 2: torch.uint16}[size])
        .view(getattr(torch, source))
    )
    wanted = patterns.float().to(getattr(torch, target))
    fine = wanted.isfinite() & patterns.float().isfinite()
    assert same_bits(rows_of(patterns[fine][None], target)[0], wanted[fine])


@pytest.mark.parametrize("target", ["bfloat16", "float16"])
def test_float32_around_every_midpoint_casts_as_in_torch(target: str) -> None:
    dropped = {"bfloat16": 16, "float16": 13}[target]
    upper = np.arange(0, 1 << 32, 1 << dropped, dtype=np.uint64)
    for below in (
        0,
        1,
        (1 << (dropped - 1)) - 1,
        1 << (dropped - 1),
        (1 << (dropped - 1)) + 1,
        (1 << dropped) - 1,
    ):
        values = torch.from_numpy((upper + below).astype(np.uint32).view(np.float32))
        wanted = values.to(getattr(torch, target))
        assert same_bits(
            rows_of(values[wanted.isfinite()][None], target)[0], wanted[wanted.isfinite()]
        )


@given(
    hnp.arrays(
        np.float64,
        st.integers(1, 40),
        elements=st.floats(-60000, 60000)
        | st.floats(-1e-36, 1e-36)
        | st.builds(
            lambda upper, nudge, sign: (
                sign
                * (float(np.uint32(upper << 16 | 0x8000).view(np.float32)) * (1 + nudge * 2.0**-45))
            ),
            st.integers(0, 0x4700),
            st.integers(-2, 2),
            st.sampled_from([-1, 1]),
        ),
    ),
    st.sampled_from(TARGETS),
)
@settings(max_examples=examples(300), derandomize=True, deadline=None)
def test_float64_is_rounded_once_to_the_nearest_even(values: Any, target: str) -> None:
    dtype = np.dtype(
        {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16, "float32": np.float32}[target]
    )
    got = rows_of(torch.from_numpy(values)[None], target).float().double()[0].tolist()
    infinity = np.array(np.inf, dtype)
    for value, rounded in zip(values.tolist(), got, strict=True):
        here = np.array(rounded, np.float64).astype(dtype)
        distance = abs(Fraction(value) - Fraction(rounded))
        for neighbour in (np.nextafter(here, infinity), np.nextafter(here, -infinity)):
            if not np.isfinite(neighbour.astype(np.float64)):
                continue
            other = abs(Fraction(value) - Fraction(float(neighbour)))
            even = int(here.view(f"u{dtype.itemsize}")) % 2 == 0
            assert distance < other or (distance == other and even)


@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("source", SOURCES)
@pytest.mark.parametrize("target", TARGETS)
def test_what_is_not_finite_is_refused(source: str, target: str, bad: float) -> None:
    if source == "float8_e4m3fn" and bad == bad:
        return
    values = torch.zeros(2000, 64)
    values[1500, 63] = bad
    values[1999, 0] = bad
    with pytest.raises(EmbeddingsError, match=r"must be finite: row 1500 holds"):
        rows_of(values.to(getattr(torch, source)), target)


@pytest.mark.parametrize(
    ("value", "source", "target"),
    [
        (65520.0, "float32", "float16"),
        (-65520.0, "float64", "float16"),
        (1e30, "bfloat16", "float16"),
        (3.4e38, "float32", "bfloat16"),
        (1e300, "float64", "float32"),
        (-1e300, "float64", "bfloat16"),
    ],
)
def test_what_overflows_in_the_cast_is_refused(value: float, source: str, target: str) -> None:
    values = torch.zeros(10, 64, dtype=getattr(torch, source))
    values[7, 3] = value
    with pytest.raises(
        EmbeddingsError, match=f"must be finite as the model's {target}: row 7 holds"
    ):
        rows_of(values, target)


def test_the_largest_values_that_fit_are_accepted() -> None:
    assert rows_of(torch.tensor([[65519.0, -65519.0]]), "float16").tolist() == [[65504.0, -65504.0]]
    largest = torch.finfo(torch.bfloat16).max
    assert rows_of(torch.tensor([[largest]], dtype=torch.float64), "bfloat16").tolist() == [
        [largest]
    ]


@pytest.mark.parametrize("source", ["float64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("value", [3.0, -3.0])
def test_a_magnitude_over_the_bound_is_refused(value: float, source: str) -> None:
    values = torch.ones(10, 64, dtype=getattr(torch, source))
    values[4, 3] = value
    assert rows_of(values, "bfloat16", max_abs=3.0)[4, 3] == value
    with pytest.raises(
        EmbeddingsError, match=r"magnitude allowed: row 4 holds 3; allowed: at most 2\.5"
    ):
        rows_of(values, "bfloat16", max_abs=2.5)


def test_the_magnitude_is_that_after_the_cast() -> None:
    just_over_two = torch.tensor([[2.001]])
    assert rows_of(just_over_two, "bfloat16", max_abs=2.0).tolist() == [[2.0]]
    with pytest.raises(EmbeddingsError, match="magnitude"):
        rows_of(just_over_two, "float32", max_abs=2.0)


def test_another_hidden_size_is_refused() -> None:
    with pytest.raises(
        EmbeddingsError, match=r"size of tensor must match .* got 64 .* the model takes 32"
    ):
        to_rows(of(torch.zeros(4, 64)), hidden_size=32, dtype="float32")


def test_another_embedding_table_is_refused() -> None:
    tensor = of(torch.zeros(4, 64), table_id="one")
    with pytest.raises(EmbeddingsError, match=r"made for embedding table 'one'; .* is 'other'"):
        to_rows(tensor, hidden_size=64, dtype="float32", table_id="other")
    assert len(to_rows(tensor, hidden_size=64, dtype="float32", table_id="one")) == 4
    assert len(to_rows(tensor, hidden_size=64, dtype="float32")) == 4
    assert (
        len(to_rows(of(torch.zeros(4, 64)), hidden_size=64, dtype="float32", table_id="other")) == 4
    )


def test_a_dtype_no_model_has_is_refused() -> None:
    with pytest.raises(EmbeddingsError, match="no model has dtype 'float64'"):
        to_rows(of(torch.zeros(4, 64)), hidden_size=64, dtype="float64")


def test_a_matrix_is_one_prompt() -> None:
    tensor = of(torch.zeros(4, 64))
    assert prompts_of(tensor) == [tensor]


@pytest.mark.parametrize("batch", [1, 3])
def test_a_batch_is_that_many_prompts_in_the_same_memory(batch: int) -> None:
    values = torch.randn(batch, 5, 16)
    tensor = read(saved(values))
    prompts = prompts_of(tensor)
    assert [prompt.shape for prompt in prompts] == [(5, 16)] * batch
    for prompt, wanted in zip(prompts, values, strict=True):
        assert torch.equal(rows_of(wanted, "float32"), wanted)
        assert bytes(prompt.data.view) == wanted.numpy().tobytes()
        assert prompt.data.view.obj is tensor.data.view.obj


def test_a_batch_of_more_prompts_than_allowed_is_refused_before_they_are_made() -> None:
    tensor = _shaped((1_000_000, 1, 1))
    with pytest.raises(EmbeddingsError, match=r"hold 1000000 prompts .* at most 128"):
        prompts_of(tensor)
    assert len(prompts_of(_shaped((128, 1, 1)))) == 128
    with pytest.raises(EmbeddingsError, match="at most 2"):
        prompts_of(_shaped((3, 4, 64)), max_prompts=2)


@pytest.mark.parametrize("shape", [(), (64,), (1, 1, 4, 64)])
def test_other_shapes_are_no_prompt(shape: tuple[int, ...]) -> None:
    with pytest.raises(
        EmbeddingsError, match=r"must be a torch.Tensor of shape \(num_tokens, hidden\)"
    ):
        prompts_of(_shaped(shape))
    with pytest.raises(
        EmbeddingsError, match=r"must be a torch.Tensor of shape \(num_tokens, hidden\)"
    ):
        to_rows(_shaped(shape), hidden_size=64, dtype="float32")


def _shaped(shape: tuple[int, ...]) -> Tensor:
    return Tensor(Buffer(bytes(4 * int(np.prod(shape)))), "float32", shape, "torch")


@given(
    bits=hnp.arrays(np.uint8, st.integers(1, 30).map(lambda n: n * 8)),
    size=st.sampled_from([1, 2, 4, 8]),
)
@settings(max_examples=examples(200), derandomize=True, deadline=None)
def test_the_largest_magnitude_is_that_of_the_bits_without_the_sign(bits: Any, size: int) -> None:
    elements = bits.view(f"<u{size}")
    sign = 1 << (8 * size - 1)
    magnitudes = [int(element) & ~sign for element in elements]
    assert largest_magnitude(elements) == max(magnitudes)
    assert first_at_least(elements, max(magnitudes)) == magnitudes.index(max(magnitudes))
    assert first_at_least(elements, sign) == -1


@pytest.mark.parametrize("format", ["torch", "safetensors", "npy"])
@pytest.mark.parametrize("target", TARGETS)
def test_bytes_on_no_boundary_are_read_and_cast(target: str, format: Any) -> None:
    values = torch.randn(40, 64, generator=torch.Generator().manual_seed(5))
    container = b"x" + write(values.numpy(), format)
    tensor = read(memoryview(container)[1:])
    assert not tensor.array.flags.aligned
    rows = to_rows(tensor, hidden_size=64, dtype=target)
    assert same_bits(
        torch.frombuffer(bytearray(rows.data.view), dtype=getattr(torch, target)).reshape(40, 64),
        values.to(getattr(torch, target)),
    )


@pytest.mark.parametrize(
    ("source", "target", "copied"),
    [
        ("float32", "float32", 0),
        ("float32", "bfloat16", 8),
        ("bfloat16", "bfloat16", 0),
        ("bfloat16", "float16", 8),
    ],
)
def test_memory_is_that_of_the_cast_and_no_more(source: str, target: str, copied: int) -> None:
    values = torch.zeros(4096, 1024, dtype=getattr(torch, source))
    container = saved(values)
    limits = ReadLimits(max_bytes=1 << 30)
    to_rows(read(container, limits=limits), hidden_size=1024, dtype=target)
    tracemalloc.start()
    try:
        rows = to_rows(read(container, limits=limits), hidden_size=1024, dtype=target, max_abs=1.0)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert len(rows) == 4096
    assert peak <= (copied + 2) << 20
