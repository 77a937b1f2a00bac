"""A model in a GGUF file, as the directory that it stands for."""

import json
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
from blake3 import blake3

from inlay.base.errors import InvalidRequestError
from inlay.base.user_cache import keep, user_cache
from inlay.tensors.blocks import TYPES, Bytes, Floats, dequantise, is_finite
from inlay.tensors.gguf import GgufFile, is_gguf, read_bytes, read_runs
from inlay.tensors.gguf_architectures import architecture_of
from inlay.tensors.gguf_config import Named, config_of, named_tensors
from inlay.tensors.gguf_tokenizer import GgufTokenizer
from inlay.tensors.stored import StoredTensor

_FORM = 2
"""Of the tokenizers made: raise it where they are made in another way."""

_LARGE = 1 << 20
"""Bytes from which on a tokenizer that was made is kept."""

_RUN = 1 << 19
"""Bytes of blocks that are read at a time, where few are wanted."""

_SAMPLING = {"temp": "temperature", "top_k": "top_k", "top_p": "top_p", "min_p": "min_p"}
_SAMPLING |= {"penalty_repeat": "repetition_penalty"}
"""Keys under `general.sampling`, and transformers' names."""


@dataclass(frozen=True, slots=True)
class GgufModel:
    """A `Checkpoint`.

    Attributes:
        gguf: header of the file.
        config: what config.json would hold.
        stored: all tensors, by the model's names.
    """

    gguf: GgufFile
    config: dict[str, Any]
    stored: tuple[StoredTensor, ...]
    _tokenizer: GgufTokenizer

    @classmethod
    def open(cls, path: Path) -> "GgufModel":
        """Read the header of a file; a file that is as it was is not read again.

        Raises:
            InvalidRequestError: no GGUF, or a model that is not known; says what is.
        """
        try:
            now = path.stat()
        except OSError as error:
            raise InvalidRequestError(f"{path} cannot be read: {error.strerror}") from error
        return _opened(path, now.st_mtime_ns, now.st_size)

    def file(self, name: str) -> bytes | None:
        """The bytes of the small file `name` of the directory that this stands for."""
        made = {
            "config.json": lambda: json.dumps(self.config).encode(),
            "generation_config.json": lambda: json.dumps(self._generation()).encode(),
            "tokenizer_config.json": lambda: json.dumps(self._tokenizer.config()).encode(),
            "tokenizer.json": self._tokenizer_form,
        }.get(name)
        return None if made is None else made()

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[StoredTensor]:
        """All tensors, whatever is wanted: they are in one header."""
        return iter(self.stored)

    def _generation(self) -> dict[str, Any]:
        asked = {
            ours: value
            for theirs, ours in _SAMPLING.items()
            if isinstance(
                value := self.gguf.metadata.get(f"general.sampling.{theirs}"), int | float
            )
        }
        ends = {"eos_token_id": self._tokenizer.end_tokens}
        return ends | asked | ({"do_sample": True} if asked else {})

    def _tokenizer_form(self) -> bytes:
        """Return the tokenizer; a large one, which takes seconds, is kept in the user's cache."""
        whole = self.gguf.metadata.get("tokenizer.huggingface.json")
        if isinstance(whole, str):
            return whole.encode()
        of = {
            key: value for key, value in self.gguf.metadata.items() if key.startswith("tokenizer.")
        }
        key = blake3(msgspec.msgpack.encode((_FORM, of))).hexdigest(16)
        name = f"{key}.json"
        with suppress(OSError):
            return (user_cache("tokenizers") / name).read_bytes()
        form = msgspec.json.encode(self._tokenizer.form())
        if len(form) < _LARGE:
            return form
        # Without a cache it is made again.
        with suppress(OSError):
            keep(user_cache("tokenizers") / name, form)
        return form


def types_in(path: Path) -> list[str]:
    """The types of the tensors of a GGUF file, that of the most bytes first; empty for others.

    Raises:
        InvalidRequestError: as `GgufModel.open`.
    """
    sizes: Counter[str] = Counter()
    for tensor in GgufModel.open(path).stored if is_gguf(path) else ():
        sizes[tensor.dtype] += tensor.nbytes
    return [name for name, _ in sizes.most_common()]


@lru_cache(maxsize=2)
def _opened(path: Path, changed_ns: int, size: int) -> GgufModel:
    file = GgufFile.open(path)
    architecture_of(file)
    tokenizer = GgufTokenizer(path, file.metadata)
    config = config_of(file, tokenizer.end_tokens)
    stored = tuple(_stored(named, file, config) for named in named_tensors(file, config))
    return GgufModel(file, config, stored, tokenizer)


def _stored(named: Named, file: GgufFile, config: dict[str, Any]) -> StoredTensor:
    kind, tensor = architecture_of(file), named.tensor
    heads = 0
    if kind.paired_heads and ".self_attn." in named.name:
        heads = {
            "q_proj": config["num_attention_heads"],
            "k_proj": config["num_key_value_heads"],
        }.get(named.name.rsplit(".", 2)[1], 0)
    shift = 1.0 if kind.shifted_norms and named.name.endswith("norm.weight") else 0.0
    return StoredTensor(
        named.name, tensor.file, tensor.type, tensor.shape, tensor.offset, tensor.nbytes, heads,
        shift,
    )  # fmt: skip


def not_finite(tensor: StoredTensor) -> InvalidRequestError:
    """The error for a tensor whose scales or values are not all numbers."""
    return InvalidRequestError(
        f"{tensor.file} cannot be served: tensor {tensor.name} has scales or values that are "
        "infinite or no numbers"
    )


def block_runs(tensor: StoredTensor, multiple: int) -> Iterator[Bytes]:
    """The blocks of a matrix, as `read_blocks`, a multiple of some rows at a time.

    Scales that are float16 are not checked. Each run lies where the last one did, so that they stay
    in the caches: memory that is new takes longer to get than what is read into it.

    Raises:
        InvalidRequestError: as `read_blocks`.
    """
    if tensor.paired_heads:
        yield read_blocks(tensor, halves=False)
        return
    row = tensor.nbytes // tensor.shape[0]
    size = max(1, _RUN // (multiple * row)) * multiple * row
    memory = memoryview(bytearray(min(size, tensor.nbytes)))
    for run in read_runs(tensor.file, tensor.offset, tensor.nbytes, memory):
        raw = np.frombuffer(run, np.uint8)
        if not TYPES[tensor.dtype].halves and not is_finite(tensor.dtype, raw):
            raise not_finite(tensor)
        yield raw.reshape(-1, row)


def read_blocks(tensor: StoredTensor, *, halves: bool = True) -> Bytes:
    """The blocks of a tensor in GGUF, rows in the model's order, [rows, bytes of a row].

    A vector is one row; `shift` is not undone.

    Args:
        tensor: the tensor.
        halves: check scales that are float16; False where the caller does.

    Raises:
        InvalidRequestError: it cannot be read, or a scale is infinite or no number.
    """
    raw = np.frombuffer(read_bytes(tensor.file, tensor.offset, tensor.nbytes), np.uint8)
    checks = halves or not TYPES[tensor.dtype].halves
    if checks and not is_finite(tensor.dtype, raw):
        raise not_finite(tensor)
    rows = tensor.shape[0] if len(tensor.shape) > 1 or tensor.paired_heads else 1
    blocks = raw.reshape(rows, -1)
    if tensor.paired_heads:
        # Rotary embeddings turn pairs of neighbours in ggml, and halves of a head in the model.
        pairs = blocks.reshape(tensor.paired_heads, -1, 2, blocks.shape[1])
        blocks = pairs.transpose(0, 2, 1, 3).reshape(blocks.shape)
    return blocks


def read_values(tensor: StoredTensor) -> Floats:
    """The values of a tensor in GGUF, float32, as the model has them.

    Raises:
        InvalidRequestError: as `read_blocks`.
    """
    values = dequantise(tensor.dtype, read_blocks(tensor), tensor.shape)
    return values - np.float32(tensor.shift) if tensor.shift else values
