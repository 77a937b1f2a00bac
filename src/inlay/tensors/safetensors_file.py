"""The safetensors format, one tensor to a file: reader and writer.

Layout: the safetensors README (an eight-byte header length, a JSON header, the data).
"""

import json
import re
from typing import Any, NoReturn

from inlay.base.errors import EmbeddingsError
from inlay.tensors.tensor import MAX_TABLE_ID_LENGTH, MIN_BYTES, Tensor, dense, quoted, refused

MAX_HEADER_BYTES = 8192
METADATA = "__metadata__"
"""Key of the header that is no tensor's name."""
_TABLE_ID = "embedding_table_id"
_GRID = "image_grid_thw"
_grid = re.compile(r"([1-9][0-9]{0,8}),([1-9][0-9]{0,8}),([1-9][0-9]{0,8})")
_DTYPES = {
    "F64": "float64",
    "F32": "float32",
    "F16": "float16",
    "BF16": "bfloat16",
    "F8_E4M3": "float8_e4m3fn",
    "F8_E5M2": "float8_e5m2",
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
NAMES = _NAMES | {
    "int64": "I64", "int32": "I32", "int16": "I16", "int8": "I8", "bool": "BOOL",
    "uint64": "U64", "uint32": "U32", "uint16": "U16", "uint8": "U8",
}  # fmt: skip
"""Name in safetensors of each dtype that a model's weights may have."""


def read_safetensors(container: memoryview) -> Tensor:
    """The tensor in a safetensors file.

    Raises:
        EmbeddingsError: not a well-formed file of one dense float tensor that fills all its data.
    """
    length = int.from_bytes(container[:8], "little")
    if length > MAX_HEADER_BYTES or 8 + length > len(container):
        raise _malformed(
            f"its header is {length} bytes long in a file of {len(container)}; allowed: at most "
            f"{MAX_HEADER_BYTES}"
        )
    header = _header(bytes(container[8 : 8 + length]))
    metadata = header.pop(METADATA, {})
    if len(header) != 1:
        raise refused(f"a safetensors file of {len(header)} tensors; send one tensor")
    ((_, entry),) = header.items()
    if not isinstance(entry, dict) or entry.keys() != {"dtype", "shape", "data_offsets"}:
        raise _malformed("its tensor is not described by dtype, shape and data_offsets")
    data = container[8 + length :]
    name = entry["dtype"]
    if not isinstance(name, str):
        raise _malformed("its dtype is not text")
    if name not in _DTYPES:
        raise refused(f"a tensor of dtype {quoted(name)}; allowed: {', '.join(_DTYPES)}")
    shape = _integers(entry["shape"])
    if _integers(entry["data_offsets"]) != (0, len(data)):
        raise _malformed(f"its tensor does not fill its {len(data)} bytes of data exactly")
    tensor = Tensor(
        dense(data, _DTYPES[name], shape),
        _DTYPES[name],
        shape,
        "safetensors",
        _table_id(metadata),
        _grid_of(metadata),
    )
    if len(tensor.data) != len(data):
        raise _malformed(
            f"shape {shape} and dtype {name} need {len(tensor.data)} bytes and it holds {len(data)}"
        )
    return tensor


def _header(raw: bytes) -> dict[str, Any]:
    if raw[:1] != b"{":
        raise _malformed("its header is not a JSON object")
    try:
        # The length bounds the depth of the recursion; the hooks leave text and whole numbers only.
        header = json.loads(
            raw.decode(),
            object_pairs_hook=_object,
            parse_int=_integer,
            parse_float=_not_whole,
            parse_constant=_not_whole,
        )
    except (ValueError, RecursionError) as error:
        raise _malformed("its header is not valid JSON") from error
    if not isinstance(header, dict):
        raise _malformed("its header is not a JSON object")
    return header


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    items = dict(pairs)
    if len(items) != len(pairs):
        raise _malformed("its header says something twice")
    return items


def _integer(digits: str) -> int:
    if len(digits) > 19:
        raise _malformed(f"its header holds a number of {len(digits)} digits")
    return int(digits)


def _not_whole(number: str) -> NoReturn:
    raise _malformed(f"its header holds the number {quoted(number)}")


def _integers(value: Any) -> tuple[int, ...]:
    if not isinstance(value, list) or any(type(item) is not int or item < 0 for item in value):
        raise _malformed("its shape or data_offsets are not whole numbers")
    return tuple(value)


def _table_id(metadata: Any) -> str | None:
    if not isinstance(metadata, dict) or any(
        not isinstance(value, str) for value in metadata.values()
    ):
        raise _malformed("its metadata is not text")
    table_id: str | None = metadata.get(_TABLE_ID)
    return table_id if table_id is None else table_id[: MAX_TABLE_ID_LENGTH + 1]


def _grid_of(metadata: dict[str, str]) -> tuple[int, int, int] | None:
    text = metadata.get(_GRID)
    if text is None:
        return None
    match = _grid.fullmatch(text)
    if match is None:
        raise _malformed(f"its {_GRID} is not three whole numbers with commas between")
    times, height, width = map(int, match.groups())
    return times, height, width


def write_safetensors(
    data: memoryview,
    dtype: str,
    shape: tuple[int, ...],
    table_id: str | None,
    grid: tuple[int, int, int] | None = None,
) -> bytes:
    """A safetensors file of one tensor, `prompt_embeds`, with table id and grid in its metadata.

    Args:
        data: elements in C order, little endian.
        dtype: one of `inlay.messages.prompt.DTYPE_SIZES`.
        shape: every size at least 1.
        table_id: of the embedding table the rows were taken from.
        grid: of the image whose rows these are.
    """
    metadata = {} if table_id is None else {_TABLE_ID: table_id}
    if grid is not None:
        metadata[_GRID] = ",".join(map(str, grid))
    header: dict[str, Any] = {METADATA: metadata} if metadata else {}
    header["prompt_embeds"] = {
        "dtype": _NAMES[dtype],
        "shape": shape,
        "data_offsets": (0, len(data)),
    }
    # Even one element makes a file of the least size that servers accept.
    return encode_header(header, MIN_BYTES - 8 - len(data)) + data


def encode_header(header: dict[str, Any], width: int = 0) -> bytes:
    """The bytes before a file's data, which begins on eight bytes.

    Args:
        header: metadata and descriptions of the tensors.
        width: bytes of the header at least.
    """
    text = json.dumps(header, separators=(",", ":")).encode()
    width = max(len(text), width)
    text = text.ljust(width + -width % 8)
    return len(text).to_bytes(8, "little") + text


def _malformed(why: str) -> EmbeddingsError:
    return refused(f"a malformed safetensors file: {why}")
