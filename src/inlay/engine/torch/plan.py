"""The plan of a step: chunks of sequences to compute; totals of steps."""

from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from inlay.engine.torch.sequence import Sequence
from inlay.prompt import Rows


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Positions [start, start + count) of a sequence.

    Attributes:
        sequence: the sequence.
        start: first position.
        count: number of positions, those of drafts included.
        samples: the last known position gives a token.
        drafts: ids of the last positions, which may turn out not to be its output. Each of them
            gives a token if those before it are.
    """

    sequence: Sequence
    start: int
    count: int
    samples: bool
    drafts: tuple[int, ...] = ()

    @property
    def num_sampled(self) -> int:
        """Number of positions at the end whose logits are needed."""
        return self.samples + len(self.drafts)

    @property
    def num_uncertain(self) -> int:
        """Number of positions at the end that may be computed again.

        Drafts, and the position before them where the mask of a grammar may be late.
        """
        return len(self.drafts) + (self.samples and self.sequence.grammar is not None)

    @property
    def decodes(self) -> bool:
        """True if it computes one known position after the prompt, and drafts."""
        known = self.count - len(self.drafts)
        return known == 1 and self.start >= self.sequence.prompt_length


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The chunks that one step computes."""

    chunks: tuple[ScheduledChunk, ...]


@dataclass(slots=True)
class PartialPlan:
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

    def add_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Add drafts to the chunk of a sequence, which has none yet."""
        chunk = self.chunks[sequence]
        self.chunks[sequence] = replace(chunk, count=chunk.count + len(drafts), drafts=drafts)
        self.left -= len(drafts)

    def lacks(self, sequence: Sequence) -> bool:
        """True if `sequence` may be planned and is not."""
        known = sequence in self.chunks or sequence in self.preempted
        return not known and sequence.request.adapter not in self.resting


@dataclass(slots=True)
class Totals:
    """Totals under the names of `inlay.card.Stats`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    rows_served: int = 0
    generated_tokens: int = 0
    steps: int = 0
    progress: int = 0

    def add_step(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Count a step."""
        self.steps += 1
        self.progress += sum(chunk.count for chunk in chunks)

    def add_prompt(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence."""
        self.prompt_tokens += len(sequence.prompt)
        self.cached_tokens += sequence.cached_tokens
        self.rows_served += sum(
            len(segment) for segment in sequence.prompt.segments if isinstance(segment, Rows)
        )
