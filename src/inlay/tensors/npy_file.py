"""numpy's `.npy` format, versions 1 to 3: reader and writer.

The header is matched, never evaluated.

Layout: NEP 1 and `numpy.lib.format`.
"""

import io
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from inlay.base.errors import EmbeddingsError
from inlay.tensors.tensor import Tensor, c_strides, dense, quoted, refused

MAGIC = b"\x93NUMPY"
MAX_HEADER_BYTES = 4096

_DTYPES = {"<f8": "float64", "<f4": "float32", "<f2": "float16"}
_PAIR = re.compile(
    r" *'(?:(?P<descr>descr)' *: *'(?P<dtype>[^'\\]{1,32})'"
    r"|(?P<order>fortran_order)' *: *(?P<fortran>True|False)"
    r"|(?P<shape>shape)' *: *\((?P<sizes>[0-9, ]*)\)) *(?:,|(?=\}))"
)
_SIZES = re.compile(r" *(?:[0-9]{1,18} *, *)*(?:[0-9]{1,18} *)?")


def read_npy(container: memoryview, dtypes: Mapping[str, str] = _DTYPES) -> Tensor:
    """The array in a `.npy` file. Fortran order is turned into C order, which copies.

    Args:
        container: the file.
        dtypes: allowed ones, by numpy's notation.

    Raises:
        EmbeddingsError: not a well-formed file of one float array that fills all its data.
    """
    version = tuple(container[6:8])
    if version not in ((1, 0), (2, 0), (3, 0)):
        raise _malformed(f"its version is {version}; allowed: 1.0, 2.0, 3.0")
    start = 10 if version[0] == 1 else 12
    length = int.from_bytes(container[8:start], "little")
    if length > MAX_HEADER_BYTES or start + length > len(container):
        raise _malformed(
            f"its header is {length} bytes long in a file of {len(container)}; allowed: at most "
            f"{MAX_HEADER_BYTES}"
        )
    descr, fortran, shape = _header(bytes(container[start : start + length]))
    dtype = dtypes.get(descr)
    if dtype is None:
        raise refused(
            f"a .npy file of dtype {quoted(descr)}{_advice(descr)}; allowed: {', '.join(dtypes)}"
        )
    data = container[start + length :]
    strides = tuple(reversed(c_strides(tuple(reversed(shape))))) if fortran else c_strides(shape)
    tensor = Tensor(dense(data, dtype, shape, strides=strides), dtype, shape, "npy")
    if len(tensor.data) != len(data):
        raise _malformed(
            f"shape {shape} and dtype {descr} need {len(tensor.data)} bytes and it holds "
            f"{len(data)}"
        )
    return tensor


def _header(raw: bytes) -> tuple[str, bool, tuple[int, ...]]:
    """dtype, Fortran order and shape out of a header like {'descr': '<f4', 'fortran_order'.

    False, 'shape': (3, 4), }.
    """
    text = raw.decode("latin-1").rstrip(" \n")
    found: dict[str, str] = {}
    at = 1
    while match := _PAIR.match(text, at):
        at = match.end()
        for key, value in (("descr", "dtype"), ("order", "fortran"), ("shape", "sizes")):
            if match[key] is not None:
                if key in found:
                    raise _malformed(f"its header says {match[key]!r} twice")
                found[key] = match[value]
    if text[:1] != "{" or text[at:].strip(" ") != "}" or len(found) != 3:
        raise _malformed("its header is not a dict of 'descr', 'fortran_order' and 'shape'")
    if not _SIZES.fullmatch(found["shape"]):
        raise _malformed(f"its shape is {quoted(found['shape'])}")
    shape = tuple(int(size) for size in found["shape"].split(",") if size.strip())
    return found["descr"], found["order"] == "True", shape


def _advice(descr: str) -> str:
    if descr.startswith(">"):
        return " (big endian: call .astype('<f4') before saving)"
    if descr.lstrip("<|=") in ("V1", "V2", "f1"):
        return " (.npy cannot name bfloat16 or float8: save as safetensors, or as float32)"
    return ""


def write_npy(array: npt.NDArray[Any], dtype: str, table_id: str | None) -> bytes:
    """A `.npy` file of `array`, which is in C order and little endian.

    Raises:
        EmbeddingsError: a dtype that the format cannot name, or a table id, for which it has no
            place.
    """
    if dtype not in _DTYPES.values():
        raise EmbeddingsError(
            f"the npy format has no {dtype}; allowed: {', '.join(_DTYPES.values())}. Write "
            "safetensors or torch instead, or cast the rows to float32"
        )
    if table_id is not None:
        raise EmbeddingsError(
            "the npy format cannot carry an embedding table id; write safetensors or torch instead"
        )
    out = io.BytesIO()
    np.lib.format.write_array(out, array, allow_pickle=False)
    return out.getvalue()


def _malformed(why: str) -> EmbeddingsError:
    return refused(f"a malformed .npy file: {why}")
