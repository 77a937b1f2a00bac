"""The reference of a pool: numbers of a model's own code that any engine can be compared with.

Logprobs, or of models that embed or score vectors or logits of pairs. Its prompts are token ids
alone, as clients send them. It is found by weights and dtype, so that all workers of a pool are
held to one, whatever engine they have. The distance is that of the self-check of the torch engine
(`inlay.engine.torch.self_check.judgement`).
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeAlias, TypeVar

import msgspec
import numpy as np
import numpy.typing as npt
from blake3 import blake3

_FORM, _FORM_OF_VECTORS = 1, "vectors 1"
"""Change with the prompts and with the form of the record."""

KEPT = 64
"""Most likely ids that are kept at each position: more than an engine names."""

BOUND = 3.0
"""Distance over which a worker differs; other kernels than torch's round more often."""

_FLOOR = {"float32": 1e-3}
_FLOOR_OF_HALF = 1e-2
"""Difference of logprobs below which no answer changes, added to error and noise."""

_FLOOR_OF_VECTORS = {"float32": 1e-5}
_FLOOR_OF_HALF_VECTORS = 1e-3
"""Likewise of vectors, relatively."""

_FEW = 8
"""Numbers of a vector, under which one may be small by chance."""

Vectors: TypeAlias = npt.NDArray[np.float32]

Named: TypeAlias = Mapping[int, float]
"""Logprobs of the most likely ids at a position."""

Answer: TypeAlias = Mapping[int, Named]
"""Logprobs after positions of a prompt, some or all."""


_Kind = TypeVar("_Kind", "PoolReference", "PoolVectors")


class PoolReference(msgspec.Struct, frozen=True, kw_only=True):
    """Logprobs of a model's own code.

    P positions of all prompts, one prompt after another.

    Attributes:
        by: library, version, attention and dtype that computed it.
        dtype: of the model.
        prompts: kind and token ids of each.
        ids: int32 [P, K], most likely first.
        logprobs: float32 [P, K], of these.
        noise: float32 [P], root mean square of what rounding changes of the likely ones.
        routed: experts are chosen, which rounding may change.
    """

    by: str
    dtype: str
    prompts: tuple[tuple[str, tuple[int, ...]], ...]
    ids: bytes
    logprobs: bytes
    noise: bytes
    routed: bool

    @classmethod
    def decode(cls, data: bytes, vocab_size: int) -> "PoolReference":
        """Return the reference that was encoded as `data`.

        Raises:
            ValueError: it is none, or not of a model with `vocab_size` ids.
        """
        found = _decoded(data, cls)
        tokens = [token for _, prompt in found.prompts for token in prompt]
        noise, ids = np.frombuffer(found.noise, "<f4"), np.frombuffer(found.ids, "<i4")
        logprobs = np.frombuffer(found.logprobs, "<f4")
        whole = tokens and len(noise) == len(tokens) and len(ids) == len(logprobs)
        if not whole or not len(ids) or len(ids) % len(tokens):
            raise ValueError("its parts do not go together")
        if not np.isfinite(noise).all() or not np.isfinite(logprobs).all():
            raise ValueError("it has numbers that are none")
        _check_ids([*tokens, ids.min(), ids.max()], vocab_size)
        return found

    def encode(self) -> bytes:
        return msgspec.msgpack.encode(self)

    def distances(self, answers: Sequence[Answer]) -> dict[str, float]:
        """Return the distance of each prompt's answer, by kind of prompt.

        The geometric mean over positions of error over noise; not a number where a logprob is not.
        """
        floor = _FLOOR.get(self.dtype, _FLOOR_OF_HALF)
        found = {}
        for (kind, positions), answer in zip(self._positions(), answers, strict=True):
            ratios = sorted(
                math.log(_error(named, positions[place][0]) + floor)
                - math.log(positions[place][1] + floor)
                for place, named in answer.items()
            )
            if not all(map(math.isfinite, ratios)):
                found[kind] = math.nan
                continue
            # At one position rounding may choose other experts, and be right.
            counted = ratios[:-1] if self.routed and len(ratios) > 1 else ratios
            found[kind] = math.exp(sum(counted) / len(counted))
        return found

    def _positions(self) -> "Iterator[tuple[str, list[tuple[Named, float]]]]":
        """Yield each prompt's kind, and its logprobs and noise at each position."""
        noise = np.frombuffer(self.noise, "<f4").tolist()
        ids, logprobs = (
            np.frombuffer(data, kind).reshape(len(noise), -1).tolist()
            for data, kind in ((self.ids, "<i4"), (self.logprobs, "<f4"))
        )
        start = 0
        for kind, prompt in self.prompts:
            places = range(start, start + len(prompt))
            yield (
                kind,
                [(dict(zip(ids[at], logprobs[at], strict=True)), noise[at]) for at in places],
            )
            start += len(prompt)


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
    form: str = _FORM_OF_VECTORS

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
        found = _decoded(data, cls)
        values = np.frombuffer(found.vectors, "<f4")
        tokens = [token for ids, _ in found.prompts for token in ids]
        if found.form != _FORM_OF_VECTORS or not tokens or not values.size:
            raise ValueError("its parts do not go together")
        if values.size % len(found.prompts) or not np.isfinite([*values, found.noise]).all():
            raise ValueError("its vectors are not those of its prompts")
        _check_ids(tokens, vocab_size)
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
        floor = _FLOOR_OF_VECTORS.get(self.dtype, _FLOOR_OF_HALF_VECTORS)
        ratios = (_errors(found, kept) + floor) / (self.noise + floor)
        pairs = any(second < len(ids) for ids, second in self.prompts)
        mean = float(np.exp(np.log(ratios).mean())) if np.isfinite(ratios).all() else math.nan
        return {"scores" if pairs else "vectors": mean}


def key_of(weights_id: str, dtype: str) -> str:
    """Return the name of the reference of a pool, 32 hex digits."""
    return blake3(repr(("pool", _FORM, weights_id, dtype)).encode()).digest(16).hex()


def _error(named: Named, kept: Named) -> float:
    """Return the root mean square of the differences of two lists of most likely ids.

    An id that only one names has, in the other, the lowest that is named there, or its own if that
    is lower: no more is known.
    """
    best = dict(list(kept.items())[: len(named)])
    low, its_low = min(named.values()), min(kept.values())
    errors = [
        *(value - kept.get(id_, min(its_low, value)) for id_, value in named.items()),
        *(max(0.0, value - low) for id_, value in best.items() if id_ not in named),
    ]
    return math.hypot(*errors) / math.sqrt(len(errors))


def _decoded(data: bytes, kind: type[_Kind]) -> _Kind:
    try:
        return msgspec.msgpack.decode(data, type=kind)
    except msgspec.MsgspecError as error:
        raise ValueError(str(error)) from error


def _check_ids(ids: Iterable[int], vocab_size: int) -> None:
    if not all(0 <= id_ < vocab_size for id_ in ids):
        raise ValueError("it has ids that the model does not have")


def _errors(found: Vectors, kept: Vectors) -> Vectors:
    """Return the size of differences over that of a vector; of single numbers, a typical one's."""
    size = np.linalg.norm(kept, axis=1)
    if kept.shape[1] < _FEW:
        size = np.full_like(size, math.sqrt(float(np.square(size).mean())))
    errors: Any = np.linalg.norm(found - kept, axis=1) / np.maximum(size, 1e-30)
    return np.asarray(errors, np.float32)
