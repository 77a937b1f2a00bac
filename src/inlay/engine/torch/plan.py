"""The plan of a step: chunks of sequences to compute; totals of steps."""

from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.sequence import Sequence
from inlay.messages.prompt import Rows

BACKGROUND_EVERY = 4
"""Steps of which one computes background sequences, while there are others to compute."""

BACKGROUND_EVERY_PROMPT = 4 * BACKGROUND_EVERY
"""As many while a prompt of others is computed."""


class ScheduledChunk:
    """Positions [start, start + count) of a sequence. Equal to itself only.

    Attributes:
        sequence: the sequence.
        start: first position.
        count: number of positions, those of drafts included.
        samples: the last known position gives a token.
        drafts: ids of the last positions, which may turn out not to be its output. Each of them
            gives a token if those before it are.
        num_sampled: number of positions at the end whose logits are needed.
        num_uncertain: number of positions at the end that may be computed again: drafts, and the
            position before them where the mask of a grammar may be late.
        decodes: it computes one known position after the prompt, and drafts.
    """

    __slots__ = (
        "count",
        "decodes",
        "drafts",
        "num_sampled",
        "num_uncertain",
        "samples",
        "sequence",
        "start",
    )

    def __init__(
        self,
        sequence: Sequence,
        start: int,
        count: int,
        samples: bool,
        drafts: tuple[int, ...] = (),
    ) -> None:
        self.sequence = sequence
        self.start = start
        self.count = count
        self.samples = samples
        self.drafts = drafts
        more = len(drafts)
        self.num_sampled = samples + more
        self.num_uncertain = more + (samples and sequence.grammar is not None)
        self.decodes = count - more == 1 and start >= sequence.prompt_length

    def __repr__(self) -> str:
        stop = self.start + self.count
        return f"ScheduledChunk({self.sequence!r}, {self.start} to {stop}, drafts {self.drafts})"


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The chunks that one step computes."""

    chunks: tuple[ScheduledChunk, ...]


@dataclass(slots=True)
class PartialPlan:
    """A plan in the making.

    Attributes:
        number: unlike that of any other plan of its scheduler.
        left: positions left of the budget.
        resting: adapters that are not in this step.
        yields: background sequences are not in this step.
        chunks: so far.
    """

    number: int
    left: int
    resting: frozenset[str]
    yields: bool = False
    chunks: dict[Sequence, ScheduledChunk] = field(default_factory=dict)

    def add(self, sequence: Sequence, count: int) -> None:
        """Add a chunk of a sequence that has none: its next `count` pending positions."""
        self.left -= count
        sequence.planned_in = self.number
        self.chunks[sequence] = ScheduledChunk(
            sequence, sequence.num_computed_tokens, count, count == sequence.pending
        )

    def add_drafts(self, sequence: Sequence, drafts: tuple[int, ...]) -> None:
        """Add drafts to the chunk of a sequence, which has none yet."""
        of = self.chunks[sequence]
        self.chunks[sequence] = ScheduledChunk(
            sequence, of.start, of.count + len(drafts), of.samples, drafts
        )
        self.left -= len(drafts)

    def lacks(self, sequence: Sequence) -> bool:
        """True if `sequence` may be planned, and is neither planned nor preempted for others."""
        if sequence.planned_in == self.number or (self.yields and sequence.is_background):
            return False
        return not self.resting or sequence.request.adapter not in self.resting


def budget(bounds: EngineLimits, running: Collection[Sequence]) -> int:
    """Return the positions of a step: who comes meanwhile waits until it is done."""
    most, usual = bounds.max_num_batched_tokens, bounds.usual_positions
    if usual is None or any(sequence.atomic for sequence in running):
        return most
    return min(most, usual + len(running))


def yields(step: int, running: Iterable[Sequence]) -> bool:
    """True if a step leaves background sequences out: others go on, and it is not theirs.

    Where a prompt of others is computed, which ends with a first token, few steps are theirs.
    """
    others = max([one.pending for one in running if not one.is_background], default=0)
    every = BACKGROUND_EVERY if others <= 1 else BACKGROUND_EVERY_PROMPT
    return others > 0 and step % every != 0


@dataclass(slots=True)
class Totals:
    """Totals under the names of `inlay.messages.card.Stats`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    rows_served: int = 0
    generated_tokens: int = 0
    steps: int = 0
    progress: int = 0

    def add_step(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Count a step."""
        self.steps += 1
        for chunk in chunks:
            self.progress += chunk.count

    def add_prompt(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence."""
        self.prompt_tokens += len(sequence.prompt)
        self.cached_tokens += sequence.cached_tokens
        self.rows_served += sum(
            len(segment) for segment in sequence.prompt.segments if isinstance(segment, Rows)
        )
