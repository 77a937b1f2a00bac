"""Files by real torch, safetensors and numpy are read with exactly their values."""

import io
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.messages.prompt import Buffer
from inlay.tensors import Tensor, read
from tests.examples import examples
from tests.tensors.containers import Record, name, safetensors_file, tensor, torch_file
from tests.tensors.hostile import DATA, ROWS, saved
from tests.tensors.hostile_pickles import PLAIN

DTYPES = (
    torch.float64,
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.float8_e4m3fn,
    torch.float8_e5m2,
)
VIEWS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "whole": lambda x: x,
    "transposed": lambda x: x.t(),
    "some rows": lambda x: x[3:5],
    "some columns": lambda x: x[:, 2:9],
    "every other row": lambda x: x[::2],
    "one row": lambda x: x[6:7],
    "one column": lambda x: x[:, 4:5],
    "one row on all dimensions": lambda x: x[2].reshape(1, 1, 1, -1),
    "a batch of one": lambda x: x.unsqueeze(0),
    "a batch of one in the middle": lambda x: x.unsqueeze(1),
    "a batch": lambda x: x.reshape(2, 4, 16),
    "a permuted batch": lambda x: x.reshape(2, 4, 16).permute(2, 0, 1),
    "channels last": lambda x: x.reshape(1, 2, 4, 16).to(memory_format=torch.channels_last),
    "a vector": lambda x: x[1],
    "a scalar": lambda x: x[1, 1],
    "detached": lambda x: x.detach(),
    "a parameter": lambda x: torch.nn.Parameter(x, requires_grad=False),
    "a buffer": lambda x: torch.nn.Buffer(x),
}


def values_of(tensor_: torch.Tensor) -> bytes:
    """The bytes of a tensor's elements in C order."""
    dense = torch.empty(tensor_.numel(), dtype=tensor_.dtype)
    dense.copy_(tensor_.detach().reshape(-1))
    return dense.view(torch.uint8).numpy().tobytes()


def assert_same(got: Tensor, wanted: torch.Tensor) -> None:
    assert got.shape == tuple(wanted.shape)
    assert got.dtype == str(wanted.dtype).removeprefix("torch.")
    assert bytes(got.data.view) == values_of(wanted)


def random_rows(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(8, 16, generator=torch.Generator().manual_seed(7)).to(dtype)


@pytest.mark.parametrize("protocol", [2, 3, 4, 5])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("view", VIEWS)
def test_torch_save_is_read(view: str, dtype: torch.dtype, protocol: int) -> None:
    wanted = VIEWS[view](random_rows(dtype))
    got = read(saved(wanted, pickle_protocol=protocol))
    assert_same(got, wanted)
    assert got.format == "torch"
    assert got.table_id is None


def test_a_parameter_with_attributes_is_read() -> None:
    parameter = torch.nn.Parameter(ROWS.clone())
    parameter.note = {"layer": 3, "names": ["a", "b"], "scale": 0.5, "none": None}  # type: ignore[attr-defined]
    assert_same(read(saved(parameter)), parameter)


def test_a_tensor_with_attributes_is_read() -> None:
    noted = ROWS.clone()
    noted.note = "made by hand"  # type: ignore[attr-defined]
    assert_same(read(saved(noted)), noted)


def test_a_tensor_that_requires_grad_is_read() -> None:
    leaf = ROWS.clone().requires_grad_()
    assert_same(read(saved(leaf)), leaf)


@pytest.mark.parametrize("device", ["cuda:0", "cuda:7", "mps:0", "xpu:1", "hpu", "no-such-device"])
def test_a_tensor_from_any_device_is_read(device: str) -> None:
    assert_same(read(torch_file(tensor((4, 16), (16, 1), length=64, device=device), DATA)), ROWS)


def test_a_file_with_its_own_name_and_no_byteorder_is_read(tmp_path: Any) -> None:
    path = tmp_path / "embeds of mine.pt"
    torch.save(ROWS, path)
    assert_same(read(path.read_bytes()), ROWS)


def test_storages_and_records_that_are_not_used_do_not_matter() -> None:
    data = torch_file(
        PLAIN, DATA, Record("archive/data/1", bytes(40)), Record("archive/notes", b"hello")
    )
    assert_same(read(data), ROWS)


@pytest.mark.parametrize("stride", [0, 1, 2**62, 2**63 - 1])
def test_the_stride_of_a_dimension_of_one_element_does_not_matter(stride: int) -> None:
    # Found by the fuzzer: in bytes it was more than numpy can take.
    data = torch_file(tensor((4, 1, 8), (16, stride, 2), length=64), DATA)
    assert_same(read(data), ROWS[:, None, ::2])


def test_a_small_view_of_a_large_storage_is_all_that_is_kept() -> None:
    large = torch.arange(100_000.0).reshape(1000, 100)
    got = read(saved(large[:, ::50]))
    assert_same(got, large[:, ::50])
    assert len(got.data) == 8000


def test_contiguous_elements_are_not_copied() -> None:
    for container in (
        bytearray(saved(ROWS)),
        bytearray(saved(ROWS[1:3])),
        bytearray(safetensors.torch.save({"x": ROWS})),
        bytearray(_numpy(ROWS.numpy())),
    ):
        got = read(memoryview(container))
        before = bytes(got.data.view)
        at = bytes(container).rindex(before)
        container[at] ^= 0xFF
        assert bytes(got.data.view) != before


OLD_FILES = sorted((Path(__file__).parent / "saved").iterdir())


@pytest.mark.parametrize("path", OLD_FILES, ids=[path.stem for path in OLD_FILES])
def test_files_by_older_torch_are_read(path: Path) -> None:
    """Each holds these values, or a view of them, as torch 1.13.1 or 2.0.1 saved them."""
    wanted = (torch.arange(32.0).reshape(4, 8) - 16) / 8
    what = path.stem.rpartition("-")[2]
    if what == "view":
        wanted = wanted.t()[1:, ::2]
    elif what != "parameter":
        wanted = wanted.to(getattr(torch, what))
    assert_same(read(path.read_bytes()), wanted)


@pytest.mark.parametrize("kind", [bytes, bytearray, memoryview, Buffer])
def test_any_bytes_are_read(kind: Any) -> None:
    assert_same(read(kind(saved(ROWS))), ROWS)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(8, 16), (1, 8, 16), (2, 4, 16), (128,)])
def test_safetensors_are_read(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    wanted = random_rows(dtype).reshape(shape)
    got = read(safetensors.torch.save({"any name": wanted}, {"format": "pt", "note": "ignored"}))
    assert_same(got, wanted)
    assert got.format == "safetensors"


def test_safetensors_of_numpy_are_read() -> None:
    assert_same(read(safetensors.numpy.save({"x": ROWS.numpy()})), ROWS)


def test_a_padded_safetensors_header_is_read() -> None:
    header = b'{"a":{"dtype":"F32","shape":[4,16],"data_offsets":[0,256]}}   '
    assert_same(read(safetensors_file(header, DATA)), ROWS)


def _numpy(array: np.ndarray[Any, Any], version: tuple[int, int] | None = None) -> bytes:
    out = io.BytesIO()
    np.lib.format.write_array(out, array, version=version)
    return out.getvalue()


@pytest.mark.parametrize("version", [(1, 0), (2, 0), (3, 0)])
@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16])
@pytest.mark.parametrize("order", ["C", "F"])
@pytest.mark.parametrize("shape", [(8, 16), (2, 4, 16), (128,)])
def test_npy_is_read(
    shape: tuple[int, ...], order: Any, dtype: Any, version: tuple[int, int]
) -> None:
    wanted = random_rows(torch.float32).numpy().astype(dtype).reshape(shape)
    got = read(_numpy(np.array(wanted, order=order), version))
    assert got.format == "npy"
    assert_same(got, torch.from_numpy(wanted))


def test_an_array_shares_the_tensors_memory_and_cannot_be_written() -> None:
    array = read(saved(ROWS.bfloat16())).array
    assert array.shape == (4, 16)
    assert array.astype(np.float32).tolist() == ROWS.bfloat16().float().tolist()
    assert not array.flags.writeable
    assert not array.flags.owndata


@pytest.mark.parametrize("rebuild", ["_rebuild_tensor_v2", "_rebuild_tensor_v3"])
def test_metadata_that_says_nothing_is_read(rebuild: str) -> None:
    tail = b"\x89" + name("collections", "OrderedDict") + b")R"
    if rebuild.endswith("v3"):
        tail += name("torch", "float32")
    opcodes = tensor(
        (4, 16), (16, 1), length=64, tail=tail + b"}", rebuild=name("torch._utils", rebuild)
    )
    assert_same(read(torch_file(opcodes, DATA)), ROWS)


@st.composite
def strided(draw: st.DrawFn) -> torch.Tensor:
    """A tensor with steps, in any order of dimensions, somewhere in a storage."""
    shape = draw(st.lists(st.integers(1, 6), min_size=1, max_size=4))
    steps = draw(st.lists(st.integers(1, 3), min_size=len(shape), max_size=len(shape)))
    starts = draw(st.lists(st.integers(0, 2), min_size=len(shape), max_size=len(shape)))
    whole = [start + n * step for n, step, start in zip(shape, steps, starts, strict=True)]
    dtype = draw(st.sampled_from(DTYPES))
    numel = int(np.prod(whole))
    base = (
        torch.from_numpy(np.random.default_rng(numel).standard_normal(numel))
        .to(dtype)
        .reshape(whole)
    )
    view = base[tuple(slice(start, None, step) for start, step in zip(starts, steps, strict=True))]
    return view.permute(draw(st.permutations(range(len(shape)))))


@given(strided())
@settings(max_examples=examples(150), derandomize=True, deadline=None)
def test_any_strided_view_is_read_as_torch_would(wanted: torch.Tensor) -> None:
    got = read(saved(wanted))
    assert_same(got, wanted)
    assert len(got.data) == wanted.numel() * wanted.element_size()
