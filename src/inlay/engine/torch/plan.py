"""The plan of a step: chunks of sequences to compute."""

from dataclasses import dataclass, field

from inlay.engine.torch.sequence import Sequence


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Positions [start, start + count) of a sequence; `samples`: the last gives a token."""

    sequence: Sequence
    start: int
    count: int
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The chunks that one step computes."""

    chunks: tuple[ScheduledChunk, ...]


@dataclass(slots=True)
class Draft:
    """A plan in the making.

    Attributes:
        left: positions left of the budget.
        resting: adapters that are not in this step.
        chunks: so far.
        preempted: sequences that were preempted for it.
    """

    left: int
    resting: frozenset[str]
    chunks: dict[Sequence, ScheduledChunk] = field(default_factory=dict)
    preempted: set[Sequence] = field(default_factory=set)

    def lacks(self, sequence: Sequence) -> bool:
        """True if `sequence` may be planned and is not."""
        known = sequence in self.chunks or sequence in self.preempted
        return not known and sequence.request.adapter not in self.resting


__all__ = ["Draft", "ScheduledChunk", "SchedulerOutput"]
