"""The reference of a pool: logprobs of a model's own code that any engine can be compared with.

Its prompts are token ids alone, as clients send them. It is found by weights and dtype, so that all
workers of a pool are held to one, whatever engine they have. The distance is that of the self-check
of the torch engine (`inlay.engine.torch.self_check.judgement`), of logprobs.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from typing import TypeAlias

import msgspec
import numpy as np
from blake3 import blake3

_FORM = 1
"""Changes with the prompts and with the form of the record."""

KEPT = 64
"""Most likely ids that are kept at each position: more than an engine names."""

BOUND = 3.0
"""Distance over which a worker differs; other kernels than torch's round more often."""

_FLOOR = {"float32": 1e-3}
_FLOOR_OF_HALF = 1e-2
"""Difference of logprobs below which no answer changes, added to error and noise."""

Named: TypeAlias = Mapping[int, float]
"""Logprobs of the most likely ids at a position."""

Answer: TypeAlias = Mapping[int, Named]
"""Logprobs after positions of a prompt, some or all."""


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
        try:
            found = _decoder.decode(data)
        except msgspec.MsgspecError as error:
            raise ValueError(str(error)) from error
        tokens = [token for _, prompt in found.prompts for token in prompt]
        noise, ids = np.frombuffer(found.noise, "<f4"), np.frombuffer(found.ids, "<i4")
        logprobs = np.frombuffer(found.logprobs, "<f4")
        whole = tokens and len(noise) == len(tokens) and len(ids) == len(logprobs)
        if not whole or not len(ids) or len(ids) % len(tokens):
            raise ValueError("its parts do not go together")
        if not np.isfinite(noise).all() or not np.isfinite(logprobs).all():
            raise ValueError("it has numbers that are none")
        if min(*tokens, ids.min()) < 0 or max(*tokens, ids.max()) >= vocab_size:
            raise ValueError("it has ids that the model does not have")
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


_decoder: "msgspec.msgpack.Decoder[PoolReference]" = msgspec.msgpack.Decoder(PoolReference)
