"""The reference of a pool of models that embed or score: vectors that any engine can be held to.

As `inlay.engine.pool_reference`, which is of logprobs; compared are vectors, or logits of pairs.
"""

import math
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt

_FORM = "vectors 1"
"""Changes with the prompts and with the form of the record."""

_FLOOR = {"float32": 1e-5}
_FLOOR_OF_HALF = 1e-3
"""Relative difference below which no answer changes, added to error and noise."""

Vectors = npt.NDArray[np.float32]


class PoolVectors(msgspec.Struct, frozen=True, kw_only=True):
    """Vectors of a model's own code.

    Attributes:
        by: library, version, attention and dtype that computed it.
        dtype: of the model.
        prompts: token ids of each, and where its second text begins: its length if it has none.
        vectors: float32 [prompts, N].
        noise: what rounding changes of a typical one, relatively.
        form: of this record.
    """

    by: str
    dtype: str
    prompts: tuple[tuple[tuple[int, ...], int], ...]
    vectors: bytes
    noise: float
    form: str = _FORM

    @classmethod
    def of(
        cls, by: str, dtype: str, prompts: Sequence[tuple[tuple[int, ...], int]], variants: Vectors
    ) -> "PoolVectors":
        """Keep the first of `variants` [V, prompts, N], from which rounding moves the others."""
        first = variants[0]
        noise = float(np.sqrt(np.mean([_errors(other, first) ** 2 for other in variants[1:]])))
        return cls(by=by, dtype=dtype, prompts=tuple(prompts), vectors=first.tobytes(), noise=noise)

    @classmethod
    def decode(cls, data: bytes, vocab_size: int) -> "PoolVectors":
        """Return the reference that was encoded as `data`.

        Raises:
            ValueError: it is none, or not of a model with `vocab_size` ids.
        """
        try:
            found = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        values = np.frombuffer(found.vectors, "<f4")
        tokens = [token for ids, _ in found.prompts for token in ids]
        if found.form != _FORM or not tokens or not values.size:
            raise ValueError("its parts do not go together")
        if values.size % len(found.prompts) or not np.isfinite([*values, found.noise]).all():
            raise ValueError("its vectors are not those of its prompts")
        if min(tokens) < 0 or max(tokens) >= vocab_size:
            raise ValueError("it has ids that the model does not have")
        return found

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    @property
    def shape(self) -> tuple[int, int]:
        """Number of prompts, and of numbers for each."""
        return len(self.prompts), len(self.vectors) // 4 // len(self.prompts)

    def distances(self, found: Vectors, *, unit: bool = False) -> dict[str, float]:
        """Return the distance of vectors [prompts, N], by what they are of.

        The geometric mean over prompts of error over noise; not a number where one is not.

        Args:
            found: from an engine.
            unit: it gives them length 1.

        Raises:
            ValueError: `found` is not of `shape`.
        """
        kept = np.frombuffer(self.vectors, "<f4").reshape(self.shape)
        if found.shape != kept.shape:
            raise ValueError(f"vectors are {found.shape}, those kept are {kept.shape}")
        if unit:
            kept = kept / np.linalg.norm(kept, axis=1, keepdims=True)
        floor = _FLOOR.get(self.dtype, _FLOOR_OF_HALF)
        ratios = (_errors(found, kept) + floor) / (self.noise + floor)
        pairs = any(second < len(ids) for ids, second in self.prompts)
        mean = float(np.exp(np.log(ratios).mean())) if np.isfinite(ratios).all() else math.nan
        return {"scores" if pairs else "vectors": mean}


def _errors(found: Vectors, kept: Vectors) -> Vectors:
    """Return the size of differences over that of a vector; of single numbers, a typical one's."""
    size = np.linalg.norm(kept, axis=1)
    if kept.shape[1] < _FEW:
        size = np.full_like(size, math.sqrt(float(np.square(size).mean())))
    errors: Any = np.linalg.norm(found - kept, axis=1) / np.maximum(size, 1e-30)
    return np.asarray(errors, np.float32)


_FEW = 8
"""Numbers of a vector, under which one may be small by chance."""

_decoder: "msgspec.msgpack.Decoder[PoolVectors]" = msgspec.msgpack.Decoder(PoolVectors)
