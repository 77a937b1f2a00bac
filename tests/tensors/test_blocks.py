"""Blocks of GGUF have the values that ggml gives them, bit for bit."""

import numpy as np
import pytest

from inlay.tensors.blocks import TYPES, dequantise, is_finite, largest
from tests.tensors.make_blocks import BLOCKS


@pytest.mark.parametrize("name", TYPES)
def test_values_are_those_of_the_package_gguf_bit_for_bit(name: str) -> None:
    golden = np.load(BLOCKS / f"{name}.npz")
    values = dequantise(name, golden["raw"], golden["values"].shape)
    assert values.dtype == np.float32
    assert values.tobytes() == golden["values"].tobytes()


@pytest.mark.parametrize("name", TYPES)
def test_values_do_not_depend_on_the_blocks_beside_them(name: str) -> None:
    """Also over the bounds of what is computed at a time."""
    kind, golden = TYPES[name], np.load(BLOCKS / f"{name}.npz")
    raw, times = golden["raw"], (1 << 18) // len(golden["values"]) + 1
    rows = dequantise(name, np.tile(raw, times), (times, len(golden["values"])))
    assert kind.size(rows.shape) == times * len(raw)
    assert (rows == rows[0]).all()


@pytest.mark.parametrize("name", TYPES)
def test_the_largest_magnitude_is_that_of_all_values(name: str) -> None:
    """Over several parts, the largest in the first, between, and in the last."""
    kind, golden = TYPES[name], np.load(BLOCKS / f"{name}.npz")
    blocks = golden["raw"].reshape(-1, kind.nbytes)
    tops = np.abs(golden["values"].reshape(len(blocks), -1)).max(1)
    most, least = int(tops.argmax()), int(tops.argmin())
    many = np.repeat(blocks[[least]], (1 << 19) // kind.elements + 1, 0)
    assert largest(name, many) == tops[least]
    for place in (0, len(many) // 2, len(many) - 1):
        one = many.copy()
        one[place] = blocks[most]
        assert largest(name, one) == tops[most]


@pytest.mark.parametrize("name", [name for name, kind in TYPES.items() if kind.halves])
def test_a_scale_that_is_no_number_is_found(name: str) -> None:
    for at in TYPES[name].halves:
        raw = np.load(BLOCKS / f"{name}.npz")["raw"].copy()
        assert is_finite(name, raw)
        raw[-TYPES[name].nbytes :][at : at + 2] = np.array([np.nan], "<f2").view(np.uint8)
        assert not is_finite(name, raw)


@pytest.mark.parametrize("name", ["F32", "F16", "BF16", "MXFP4"])
def test_a_value_that_is_no_number_is_found(name: str) -> None:
    raw = np.load(BLOCKS / f"{name}.npz")["raw"].copy()
    raw[-TYPES[name].nbytes :] = 0xFF
    assert not is_finite(name, raw)


def test_bytes_that_are_no_tensor_of_the_shape_are_refused() -> None:
    with pytest.raises(ValueError, match="whole blocks of 34"):
        dequantise("Q8_0", b"x" * 35, (32,))
    with pytest.raises(ValueError, match=r"no tensor of shape \(2, 16\)"):
        dequantise("Q8_0", b"x" * 34, (2, 16))
