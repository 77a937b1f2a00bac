"""`Speculator`: drafts for the decoding sequences of a step, as many as pay."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace

from inlay.engine.speculation import SpeculativeConfig
from inlay.engine.torch.cache.table import PageTable
from inlay.engine.torch.plan import PartialPlan, ScheduledChunk
from inlay.engine.torch.sampling.chooser import ChosenTokens
from inlay.engine.torch.sampling.sampler import SampledToken
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation.costs import StepCosts, best_lengths
from inlay.engine.torch.speculation.ngram import History, lookup
from inlay.errors import InlayError
from inlay.request import FinishReason

PRIOR = 0.5
"""Probability that a draft is accepted, before anything is known."""

_WEIGHT = 0.1
"""Weight of one draft's fate in the moving average of a sequence."""

_RETURN = 0.01
"""Part of the way back to `PRIOR` in a step without drafts: what changed is tried again."""


@dataclass(slots=True)
class SpeculationCounts:
    """Totals since the start, under the names of vLLM's metrics.

    Attributes:
        drafts: chunks with drafts.
        draft_tokens: drafted tokens.
        accepted_tokens: those that became output.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(slots=True)
class AcceptedRun:
    """Tokens that a chunk with drafts gave.

    Attributes:
        tokens: sampled tokens; all but the last are drafts.
        error: why no token could be sampled after them, or None.
    """

    tokens: list[SampledToken] = field(default_factory=list)
    error: InlayError | None = None

    @property
    def accepted(self) -> int:
        """Number of drafts among the tokens."""
        return max(0, len(self.tokens) - 1)


class _Drafting:
    """State of one sequence."""

    __slots__ = ("acceptance", "history")

    def __init__(self, sequence: Sequence) -> None:
        self.history = History(sequence)
        self.acceptance = PRIOR


class Speculator:
    """Drafts tokens, and learns how often they are accepted and what they cost.

    Keeps the ids of a sequence until `forget`.

    Attributes:
        counts: totals.
    """

    def __init__(self, config: SpeculativeConfig) -> None:
        """Start without knowledge of costs."""
        self._config = config
        self._costs = StepCosts()
        self._drafting: dict[Sequence, _Drafting] = {}
        self.counts = SpeculationCounts()

    def __len__(self) -> int:
        """Number of sequences with state."""
        return len(self._drafting)

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of `sequence`, if any."""
        self._drafting.pop(sequence, None)

    def extend(self, plan: PartialPlan, table: PageTable, page_size: int, running: int) -> None:
        """Add drafts to the sequences of a plan that decode, where they pay.

        Args:
            plan: of a step; its budget of positions holds for drafts too.
            table: gives the pages for them.
            page_size: positions in a page.
            running: number of running sequences. Pages are left for each, which may need one in
                the next step.
        """
        decoding = {
            sequence: chunk
            for sequence, chunk in plan.chunks.items()
            # Hidden states are not recorded of drafts.
            if chunk.samples and chunk.count == 1 and sequence.sampling.hidden_states is None
        }
        limits = {
            sequence: min(plan.left, sequence.sampling.max_tokens - len(sequence.output) - 1)
            for sequence in decoding
        }
        rows = sum(chunk.count for chunk in plan.chunks.values())
        for sequence, ids in self._drafts(limits, rows, plan.left).items():
            chunk, runs = decoding[sequence], sequence.pages
            spare = max(0, table.available // len(runs) - running)
            room = (runs[0].end + spare) * page_size - chunk.start - 1
            drafts = ids[:room]
            count = 1 + len(drafts)
            table.grow(runs, max(0, -(-(chunk.start + count) // page_size) - runs[0].end))
            plan.chunks[sequence] = replace(chunk, count=count, drafts=drafts)
            plan.left -= len(drafts)

    def _drafts(
        self, limits: Mapping[Sequence, int], rows: int, room: int
    ) -> dict[Sequence, tuple[int, ...]]:
        """Return drafts of sequences that decode; none where they do not pay.

        Args:
            limits: maximum number of drafts of each.
            rows: positions of the step without drafts.
            room: maximum number of drafts of all together.
        """
        found: dict[Sequence, list[int]] = {}
        for sequence, limit in limits.items():
            state = self._drafting.get(sequence)
            if state is None:
                state = self._drafting[sequence] = _Drafting(sequence)
            found[sequence] = lookup(
                state.history.after(sequence.output),
                min(limit, self._config.num_speculative_tokens),
                self._config.prompt_lookup_min,
                self._config.prompt_lookup_max,
            )
        sequences = list(found)
        counts = best_lengths(
            {
                place: (self._drafting[sequence].acceptance, len(found[sequence]))
                for place, sequence in enumerate(sequences)
            },
            rows,
            self._costs,
            room,
        )
        for place, sequence in enumerate(sequences):
            if place not in counts:
                state = self._drafting[sequence]
                state.acceptance += _RETURN * (PRIOR - state.acceptance)
        return {
            sequences[place]: tuple(found[sequences[place]][:count])
            for place, count in counts.items()
        }

    def accept(
        self,
        choices: Mapping[ScheduledChunk, SampledToken | InlayError | None],
        choose: Callable[[list[ScheduledChunk], int], ChosenTokens],
        append: Callable[[Sequence, SampledToken], FinishReason | None],
    ) -> dict[ScheduledChunk, AcceptedRun]:
        """Append the tokens of chunks with drafts: sampled ones, as long as they are the drafts.

        The token after each accepted draft is sampled as in a step of its own, with all before it
        known.

        Args:
            choices: chunks, and what was sampled after their known positions, if anything.
            choose: samples after the n-th draft of chunks, n from 1 on.
            append: appends a token to a sequence; returns why its output has ended, if it has.
        """
        runs = {chunk: AcceptedRun() for chunk in choices}
        place = 0
        while choices:
            going = []
            for chunk, choice in choices.items():
                if isinstance(choice, InlayError):
                    runs[chunk].error = choice
                elif choice is not None:
                    reason = append(chunk.sequence, choice)
                    runs[chunk].tokens.append(choice)
                    expected = chunk.drafts[place : place + 1] == (choice.token_id,)
                    if expected and reason is None:
                        going.append(chunk)
            place += 1
            choices = choose(going, place).read()
        for chunk, run in runs.items():
            self._learn(chunk, run.accepted)
        return runs

    def _learn(self, chunk: ScheduledChunk, accepted: int) -> None:
        """Record that the first `accepted` drafts of `chunk` became output."""
        drafted = len(chunk.drafts)
        self.counts.drafts += 1
        self.counts.draft_tokens += drafted
        self.counts.accepted_tokens += accepted
        state = self._drafting.get(chunk.sequence)
        if state is not None:
            # The draft after the last accepted one was tried too; those behind it tell nothing.
            fates = [1.0] * accepted + [0.0] * (accepted < drafted)
            for fate in fates:
                state.acceptance += _WEIGHT * (fate - state.acceptance)

    def timed(self, chunks: Iterable[ScheduledChunk], seconds: float) -> None:
        """Learn from the time of a step, if all its sequences decoded."""
        rows = 0
        for chunk in chunks:
            if chunk.count != 1 + len(chunk.drafts):
                return
            rows += chunk.count
        self._costs.learn(rows, seconds)


__all__ = ["AcceptedRun", "SpeculationCounts", "Speculator"]
