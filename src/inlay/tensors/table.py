"""A model's weights as they lie on disk, read without torch.

Tensors of its files, and the input embedding table.

Files are memory-mapped and only what is asked for is touched, so a table of gigabytes costs tens of
megabytes. The format: https://huggingface.co/docs/safetensors (8 bytes of little-endian header
length, a JSON header, the data).
"""

import json
import mmap
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import ml_dtypes
import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from inlay.base.errors import InvalidRequestError
from inlay.tensors.safetensors_file import METADATA
from inlay.tensors.weight_files import weight_files

_NUMPY: dict[str, np.dtype[Any]] = {
    "F64": np.dtype(np.float64),
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "BF16": np.dtype(ml_dtypes.bfloat16),
}

_NAMES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}

_TABLES = (
    "embed_tokens.weight",
    "wte.weight",
    "word_embeddings.weight",
    "embed_in.weight",
    "tok_embeddings.weight",
)
"""Suffixes of the name of the input embedding table, by families."""

_OMNI, _THINKER = "qwen2_5_omni", "Qwen2_5OmniThinkerForConditionalGeneration"
_TALKER = "talker."
"""Prefix of the names of the weights of an omni model's talker."""

_OF_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
"""A tensor of one layer, which the model's own embedding table is not."""

_SCALED_BY_ROOT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "vaultgemma"}
)
"""Model types whose embeddings are scaled by sqrt(hidden size), in the model's dtype."""

_LFS_POINTER = b"version https://git-lfs.github.com/spec/"
_LEAST_BYTES = 10
"""Of a safetensors file: the length of its header, and an empty one."""
_MAX_HEADER = 100 << 20
_SAMPLED_ROWS = 512
_CHUNK_BYTES = 8 << 20


class _Entry(msgspec.Struct):
    dtype: str
    shape: tuple[int, ...]
    data_offsets: tuple[int, int]


@dataclass(frozen=True, slots=True)
class StoredTensor:
    """Location of a tensor: `dtype` as safetensors names it, `offset` in `file`, `nbytes`."""

    name: str
    file: Path
    dtype: str
    shape: tuple[int, ...]
    offset: int
    nbytes: int


def config_of(directory: Path) -> dict[str, Any]:
    """The model's `config.json`; of Qwen2.5-Omni its thinker's, which is the language model.

    Raises:
        InvalidRequestError: there is none, or it is not a JSON object.
    """
    path = directory / "config.json"
    try:
        config = json.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise InvalidRequestError(
            f"{directory} has no config.json: not a model directory", param="model"
        ) from error
    except (OSError, ValueError) as error:
        raise InvalidRequestError(
            f"{directory} is not a model directory: config.json: {error}"
        ) from error
    if not isinstance(config, dict):
        raise InvalidRequestError(f"{path} holds {type(config).__name__}, not an object")
    return thinker_config(config)


def thinker_config(config: dict[str, Any]) -> dict[str, Any]:
    """The thinker's part of a Qwen2.5-Omni's configuration; any other is returned as it is.

    A thinker that was saved alone is of the same type.
    """
    kind = {"model_type": _OMNI, "architectures": [_THINKER]}
    thinker = config.get("thinker_config")
    if config.get("model_type") == _OMNI and isinstance(thinker, dict):
        own = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
        return {**own, **thinker, **kind}
    return {**config, **kind} if config.get("model_type") == f"{_OMNI}_thinker" else config


def stored_tensors(
    directory: Path, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[StoredTensor]:
    """All tensors of a directory's weights (`weight_files`), in order of files and headers.

    Args:
        directory: of a model.
        wanted: which names matter: files that hold none of them, as the index says, may be missing.

    Raises:
        InvalidRequestError: no such file, a header that does not fit its file, or a tensor in two
            files; says which, and what is wrong.
    """
    seen: dict[str, Path] = {}
    for file in weight_files(directory).paths(wanted):
        for tensor in tensors_in(file):
            if seen.setdefault(tensor.name, file) is not file:
                raise InvalidRequestError(
                    f"{directory} has tensor {tensor.name} twice: in {seen[tensor.name].name} and "
                    f"in {file.name}"
                )
            yield tensor


def check_tensors(directory: Path) -> None:
    """Read the headers of a model's weight files, and nothing else.

    Raises `InvalidRequestError` as `stored_tensors`.
    """
    for _ in stored_tensors(directory):
        pass


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


class _Header(NamedTuple):
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


def _header(file: Path, max_header: int) -> _Header:
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
        raise InvalidRequestError(f"{file} is not a safetensors file: {error}") from error
    return _Header(entries, metadata, length, size)


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


class EmbeddingTable:
    """The input embedding matrix of a model directory, memory-mapped.

    Rows come as the model's `inputs_embeds` would have them: after the scale of models that scale
    their embeddings.

    Attributes:
        shape: (vocabulary, hidden size).
        dtype: as stored, one of `inlay.messages.prompt.DTYPE_SIZES`.
        scale: factor from the stored table to rows, in the stored dtype's precision; 1 for most
            models.
    """

    def __init__(self, tensor: StoredTensor, *, scaled_by_root: bool) -> None:
        """Map `tensor`; use `open` to find it."""
        if len(tensor.shape) != 2 or tensor.dtype not in _NUMPY:
            raise InvalidRequestError(
                f"{tensor.name} is a {tensor.dtype} tensor of shape {tensor.shape}; "
                f"an embedding table is (vocabulary, hidden) in {', '.join(_NUMPY)}"
            )
        numpy_dtype = _NUMPY[tensor.dtype]
        if (
            tensor.shape[0] * tensor.shape[1] * numpy_dtype.itemsize != tensor.nbytes
            or not tensor.nbytes
        ):
            raise InvalidRequestError(
                f"{tensor.name} of shape {tensor.shape} has {tensor.nbytes} bytes"
            )
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.dtype = _NAMES[tensor.dtype]
        self._root = scaled_by_root
        self._tensor = tensor
        with tensor.file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)
        self._table: npt.NDArray[Any] = np.frombuffer(
            self._map, numpy_dtype, self.shape[0] * self.shape[1], tensor.offset
        ).reshape(self.shape)

    @classmethod
    def open(cls, directory: Path | str) -> "EmbeddingTable":
        """The table of the model in `directory`, whatever its family and however it is sharded.

        Raises:
            InvalidRequestError: no model there, or no table that can be told from other tensors.
        """
        directory = Path(directory)
        config = config_of(directory)
        text = config.get("text_config", config)
        found = [
            tensor
            for tensor in stored_tensors(directory, _may_be_table)
            if _may_be_table(tensor.name)
        ]
        hidden = text.get("hidden_size", text.get("n_embd"))
        fitting = [
            tensor
            for tensor in found
            if len(tensor.shape) == 2 and hidden in (None, tensor.shape[1])
        ]
        language = [tensor for tensor in fitting if "language_model" in tensor.name] or fitting
        if len(language) != 1:
            raise InvalidRequestError(
                f"{directory} has {len(language)} tensors that may be the embedding table "
                f"({', '.join(tensor.name for tensor in found) or 'none'}); expected one"
            )
        return cls(language[0], scaled_by_root=text.get("model_type") in _SCALED_BY_ROOT)

    @property
    def scale(self) -> float:
        """Factor from the stored table to rows, rounded to the stored dtype as models do.

        1 for most.
        """
        return self._scale(self._table.dtype)

    def _scale(self, dtype: np.dtype[Any]) -> float:
        return float(np.array(self.shape[1] ** 0.5).astype(dtype)) if self._root else 1.0

    def rows(
        self, ids: Sequence[int] | npt.NDArray[np.integer[Any]], dtype: str | None = None
    ) -> npt.NDArray[Any]:
        """The rows of token ids, [len(ids), hidden], after the scale.

        Args:
            ids: token ids.
            dtype: the model's activation dtype; the stored one unless given. Cast before the scale,
                as models do.

        Raises:
            InvalidRequestError: an id outside the vocabulary, or a dtype that is not a model's.
        """
        index = np.asarray(ids, dtype=np.int64)
        if index.size and not (index.min() >= 0 and index.max() < self.shape[0]):
            raise InvalidRequestError(
                f"token ids must be in [0, {self.shape[0]}), got {index.min()} to {index.max()}"
            )
        target = self._table.dtype if dtype is None else _by_name(dtype)
        rows = self._table[index].astype(target, copy=False)
        if self._root:
            rows = (rows.astype(np.float32) * np.float32(self._scale(target))).astype(target)
        return rows

    @property
    def id(self) -> str:
        """32 hex digits: BLAKE3 of dtype, shape and up to 512 rows spread over the table.

        Names and files do not count.
        """
        hasher = blake3(f"{self.dtype}:{self.shape[0]}:{self.shape[1]}:{self.scale}".encode())
        for index in spread(self.shape[0], _SAMPLED_ROWS):
            hasher.update(self._table[index].tobytes())
        return hasher.digest(16).hex()

    def chunks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """(first id, stored rows before the scale) over the whole table, a few megabytes at a time.

        Each chunk is valid until the next is asked for: its pages are then given back to the
        system.
        """
        step = max(1, _CHUNK_BYTES // (self.shape[1] * self._table.dtype.itemsize))
        row_bytes = self.shape[1] * self._table.dtype.itemsize
        for start in range(0, self.shape[0], step):
            stop = min(self.shape[0], start + step)
            yield start, self._table[start:stop]
            if hasattr(mmap, "MADV_DONTNEED"):
                low = self._tensor.offset + start * row_bytes
                low -= low % mmap.PAGESIZE
                self._map.madvise(
                    mmap.MADV_DONTNEED, low, self._tensor.offset + stop * row_bytes - low
                )

    def abs_max(self) -> float:
        """The largest absolute value in the table, after the scale. Reads the whole table once."""
        largest = 0.0
        for _, rows in self.chunks():
            # Clearing the sign bit orders finite floats as integers: no cast of the whole table to
            # a wider type.
            bits = rows.view(f"u{rows.dtype.itemsize}") & (2 ** (8 * rows.dtype.itemsize - 1) - 1)
            largest = max(largest, float(np.array(bits.max()).view(rows.dtype)))
        return largest * self.scale


def _may_be_table(name: str) -> bool:
    """True if a tensor of this name may be the model's embedding table."""
    called = name in _TABLES or name.endswith(tuple(f".{table}" for table in _TABLES))
    # A layer that predicts further tokens has a copy of its own.
    return called and not _OF_A_LAYER.search(name) and not name.startswith(_TALKER)


def spread(length: int, count: int) -> list[int]:
    """Up to `count` indices spread evenly over `range(length)`, the first and the last included."""
    if length <= count:
        return list(range(length))
    return [index * (length - 1) // (count - 1) for index in range(count)]


def _by_name(dtype: str) -> np.dtype[Any]:
    known: Mapping[str, np.dtype[Any]] = {name: _NUMPY[key] for key, name in _NAMES.items()}
    if dtype not in known:
        raise InvalidRequestError(f"a model's dtype is one of {', '.join(known)}; got {dtype!r}")
    return known[dtype]
