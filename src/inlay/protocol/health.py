"""Counters and health of an engine, and reachability of workers."""

from typing import Protocol, runtime_checkable

import msgspec


class Stats(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """An engine's counters; totals only grow."""

    running: int = 0
    waiting: int = 0
    blocks_used: int = 0
    blocks_total: int = 0
    prompt_tokens: int = 0
    cached_tokens: int = 0
    rows_served: int = 0
    generated_tokens: int = 0
    preemptions: int = 0
    steps: int = 0
    progress: int = 0
    """Positions computed since the start: grows while the engine lives, even through a long prefill."""
    kept_bytes: int = 0
    """Of stored prompts' rows that the worker keeps now; it changes both ways."""
    kept_hits: int = 0
    """Uses of those that it had; then those that were sent to it, and what went to make room."""
    kept_misses: int = 0
    kept_evictions: int = 0
    busy_seconds: float = 0.0
    """Seconds in which the model had a batch; of engines that make vectors."""


class Probe(msgspec.Struct, frozen=True, kw_only=True):
    """What a worker found when it had its engine do something.

    Attributes:
        at: Unix time, on the worker's clock, when the engine had answered or was given up.
        seconds: it took until then.
        error: why it failed, or None.
        next_within: seconds after `at` in which another is known, or the worker itself is stuck.
    """

    at: float
    seconds: float
    error: str | None = None
    next_within: float


@runtime_checkable
class Reaches(Protocol):
    """A plane whose workers may all be out of reach for a while, though they are there."""

    def unreachable(self) -> str | None:
        """Say why nothing reaches any worker now, or None."""
        ...


__all__ = ["Probe", "Reaches", "Stats"]
