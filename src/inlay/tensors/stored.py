"""Tensors in files of weights, found without torch.

The format of safetensors: https://huggingface.co/docs/safetensors (8 bytes of little-endian header
length, a JSON header, the data).
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import msgspec

from inlay.base.errors import InvalidRequestError, parser_words
from inlay.tensors.safetensors_file import METADATA

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LEAST_BYTES = 10
"""Of a safetensors file: the length of its header, and an empty one."""
_MAX_HEADER = 100 << 20


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor.

    Attributes:
        name: in the model.
        file: that holds it.
        dtype: as safetensors names it; of a tensor in GGUF one of `blocks.TYPES`.
        shape: elements in each dimension.
        offset: of its first byte in `file`.
        nbytes: of it.
        paired_heads: heads in which GGUF has the rows of the two halves in turn; 0 for none.
        shift: what GGUF has added to each value.
    """

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int
    paired_heads: int = 0
    shift: float = 0.0


def tensors_in(file: Path, max_header: int = _MAX_HEADER) -> Iterator[StoredTensor]:
    """All tensors of one safetensors file, in the order of its header.

    That shape and bytes agree is not checked.

    Raises:
        InvalidRequestError: not such a file, or a header that does not fit it or is longer than
            `max_header` bytes.
    """
    entries, _, length, size = _header(file, max_header)
    data = size - 8 - length
    for name, entry in entries.items():
        start, stop = entry.data_offsets
        if not 0 <= start <= stop:
            raise InvalidRequestError(
                f"{file} is damaged: tensor {name} would lie at {start} to {stop}"
            )
        if stop > data:
            whole = 8 + length + max(entry.data_offsets[1] for entry in entries.values())
            raise InvalidRequestError(f"{file} is cut short: it has {size} of {whole} bytes")
        yield StoredTensor(name, file, entry.dtype, entry.shape, 8 + length + start, stop - start)


def metadata_in(file: Path, max_header: int = _MAX_HEADER) -> dict[str, str]:
    """Return the metadata of a safetensors file; empty if it has none. Raises as `tensors_in`."""
    raw = _header(file, max_header).metadata
    try:
        return {} if raw is None else msgspec.json.decode(raw, type=dict[str, str])
    except msgspec.DecodeError as error:
        raise InvalidRequestError(f"the metadata of {file} are no texts: {error}") from error


class _SafetensorsHeader(NamedTuple):
    """The header of a safetensors file.

    Attributes:
        tensors: by name.
        metadata: of the file.
        length: bytes of the header.
        size: bytes of the file.
    """

    tensors: dict[str, _Entry]
    metadata: msgspec.Raw | None
    length: int
    size: int


def _header(file: Path, max_header: int) -> _SafetensorsHeader:
    try:
        size = file.stat().st_size
        with file.open("rb") as stream:
            first = stream.read(8)
            length = int.from_bytes(first, "little")
            if not 2 <= length <= min(max_header, size - 8):
                raise InvalidRequestError(_no_header(file, first, length, max_header))
            header = msgspec.json.decode(stream.read(length), type=dict[str, msgspec.Raw])
        metadata = header.pop(METADATA, None)
        entries = {name: msgspec.json.decode(raw, type=_Entry) for name, raw in header.items()}
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}") from error
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise InvalidRequestError(
            f"{file} is not a safetensors file: {parser_words(error)}"
        ) from error
    return _SafetensorsHeader(entries, metadata, length, size)


def _no_header(file: Path, first: bytes, length: int, most: int) -> str:
    """Return the message for a file whose first 8 bytes say a header of over `most` bytes."""
    if first == _LFS_POINTER[:8]:
        return (
            f"{file} is a pointer of Git LFS and not the weights: `git lfs pull` in its directory "
            "fetches them"
        )
    size = file.stat().st_size
    if size < _LEAST_BYTES:
        return f"{file} is cut short: it has {size} bytes"
    if 2 <= length <= most:
        return f"{file} is cut short: it has {size} bytes, its header alone {length}"
    return f"{file} is not a safetensors file: its first 8 bytes say a header of {length} bytes"
