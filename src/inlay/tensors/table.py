"""A model's input embedding table as it lies on disk, read without torch.

Only the rows that are asked for are touched, so a table of gigabytes costs tens of megabytes.
"""

import mmap
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
from blake3 import blake3

from inlay.base.errors import InvalidRequestError
from inlay.tensors.blocks import TYPES, dequantise, largest
from inlay.tensors.checkpoint import config_of, stored_tensors
from inlay.tensors.gguf import is_gguf, read_bytes
from inlay.tensors.stored import StoredTensor

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

_TALKER = "talker."
"""Prefix of the names of the weights of an omni model's talker."""

_OF_A_LAYER = re.compile(r"(^|\.)layers\.\d+\.")
"""A tensor of one layer, which the model's own embedding table is not."""

_SCALED_BY_ROOT = frozenset(
    {"gemma", "gemma2", "gemma3", "gemma3_text", "gemma3n_text", "gemma4_text", "vaultgemma"}
)
"""Model types whose embeddings are scaled by sqrt(hidden size), in the model's dtype."""

_SAMPLED_ROWS = 512
_CHUNK_BYTES = 8 << 20


class _Mapped:
    """A table of floats, memory-mapped."""

    def __init__(self, tensor: StoredTensor) -> None:
        self.dtype = _NUMPY[tensor.dtype]
        shape = tensor.shape
        if shape[0] * shape[1] * self.dtype.itemsize != tensor.nbytes or not tensor.nbytes:
            raise InvalidRequestError(f"{tensor.name} of shape {shape} has {tensor.nbytes} bytes")
        self._tensor = tensor
        with tensor.file.open("rb") as stream:
            self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        if hasattr(mmap, "MADV_RANDOM"):
            self._map.madvise(mmap.MADV_RANDOM)
        self._table: npt.NDArray[Any] = np.frombuffer(
            self._map, self.dtype, shape[0] * shape[1], tensor.offset
        ).reshape(shape)

    def rows(self, index: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        return self._table[index]

    def raw(self, index: int) -> bytes:
        return bytes(self._table[index].tobytes())

    def chunk(self, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        """Yield rows, whose pages are given back to the system afterwards."""
        yield self._table[start:stop]
        if hasattr(mmap, "MADV_DONTNEED"):
            row_bytes = self._tensor.nbytes // len(self._table)
            low = self._tensor.offset + start * row_bytes
            low -= low % mmap.PAGESIZE
            end = self._tensor.offset + stop * row_bytes
            self._map.madvise(mmap.MADV_DONTNEED, low, end - low)

    def largest(self, start: int, stop: int, least: float) -> float:
        """Return the largest magnitude of rows, or `least` if none is above it."""
        found = least
        for rows in self.chunk(start, stop):
            # Clearing the sign bit orders finite floats as integers: no cast of the whole table to
            # a wider type.
            bits = rows.view(f"u{rows.dtype.itemsize}") & (2 ** (8 * rows.dtype.itemsize - 1) - 1)
            found = max(found, float(np.array(bits.max()).view(rows.dtype)))
        return found


class _Blocks:
    """A table in a GGUF file, of which only the rows asked for are read; values are float32."""

    def __init__(self, tensor: StoredTensor) -> None:
        self._tensor = tensor
        self._row_bytes = tensor.nbytes // tensor.shape[0]

    def rows(self, index: npt.NDArray[np.int64]) -> npt.NDArray[Any]:
        raw = b"".join(map(self.raw, index.tolist()))
        return dequantise(self._tensor.dtype, raw, (len(index), self._tensor.shape[1]))

    def raw(self, index: int) -> bytes:
        return bytes(self._read(index, 1))

    def chunk(self, start: int, stop: int) -> Iterator[npt.NDArray[Any]]:
        raw = self._read(start, stop - start)
        yield dequantise(self._tensor.dtype, raw, (stop - start, self._tensor.shape[1]))

    def largest(self, start: int, stop: int, least: float) -> float:
        return largest(self._tensor.dtype, self._read(start, stop - start), least)

    def _read(self, start: int, count: int) -> bytearray:
        offset = self._tensor.offset + start * self._row_bytes
        return read_bytes(self._tensor.file, offset, count * self._row_bytes)


class EmbeddingTable:
    """The input embedding matrix of a model, of which only the rows asked for are read.

    Rows come as the model's `inputs_embeds` would have them: after the scale of models that scale
    their embeddings. Those of a quantised table are the values of its blocks.

    Attributes:
        shape: (vocabulary, hidden size).
        dtype: as stored, one of `inlay.messages.prompt.DTYPE_SIZES`; of a table in GGUF, that of
            its configuration.
        stored_as: the same, or the type of its blocks.
        scale: factor from the stored table to rows, in the stored dtype's precision; 1 for most
            models.
    """

    def __init__(
        self, tensor: StoredTensor, *, scaled_by_root: bool, dtype: str | None = None
    ) -> None:
        """Read `tensor`; use `open` to find it.

        Args:
            tensor: the table.
            scaled_by_root: rows are scaled by the root of their size.
            dtype: of the model, if its tensors are in GGUF; None for a table in safetensors.
        """
        known = _NUMPY if dtype is None else TYPES
        if len(tensor.shape) != 2 or tensor.dtype not in known:
            raise InvalidRequestError(
                f"{tensor.name} is a {tensor.dtype} tensor of shape {tensor.shape}; "
                f"an embedding table is (vocabulary, hidden) in {', '.join(known)}"
            )
        self.shape = (tensor.shape[0], tensor.shape[1])
        self.dtype = _NAMES.get(tensor.dtype, "") if dtype is None else dtype
        self.stored_as = _NAMES.get(tensor.dtype, tensor.dtype)
        self._dtype = _by_name(self.dtype)
        self._root = scaled_by_root
        self._source = _Mapped(tensor) if dtype is None else _Blocks(tensor)

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
        return cls(
            language[0],
            scaled_by_root=text.get("model_type") in _SCALED_BY_ROOT,
            dtype=text["dtype"] if is_gguf(directory) else None,
        )

    @property
    def scale(self) -> float:
        """Factor from the stored table to rows, rounded to the stored dtype as models do.

        1 for most.
        """
        return self._scale(self._dtype)

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
        target = self._dtype if dtype is None else _by_name(dtype)
        rows = self._source.rows(index).astype(target, copy=False)
        if self._root:
            rows = (rows.astype(np.float32) * np.float32(self._scale(target))).astype(target)
        return rows

    @property
    def id(self) -> str:
        """32 hex digits: BLAKE3 of type, shape and up to 512 rows spread over the table, as stored.

        Names and files do not count.
        """
        hasher = blake3(f"{self.stored_as}:{self.shape[0]}:{self.shape[1]}:{self.scale}".encode())
        for index in spread(self.shape[0], _SAMPLED_ROWS):
            hasher.update(self._source.raw(index))
        return hasher.digest(16).hex()

    def chunks(self) -> Iterator[tuple[int, npt.NDArray[Any]]]:
        """(first id, stored rows before the scale) over the whole table, a few megabytes at a time.

        Each chunk is valid until the next is asked for: its pages are then given back to the
        system.
        """
        for start, stop in self._spans():
            for rows in self._source.chunk(start, stop):
                yield start, rows

    def _spans(self) -> Iterator[tuple[int, int]]:
        step = max(1, _CHUNK_BYTES // (self.shape[1] * self._dtype.itemsize))
        for start in range(0, self.shape[0], step):
            yield start, min(self.shape[0], start + step)

    def abs_max(self) -> float:
        """The largest absolute value in the table, after the scale. Reads the whole table once."""
        found = 0.0
        for span in self._spans():
            found = self._source.largest(*span, found)
        return found * self.scale


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
