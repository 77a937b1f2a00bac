"""`Speculator`: drafts for the decoding sequences of a step, as many as pay."""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from inlay.engine.torch.cache.table import PageTable
from inlay.engine.torch.grammar.masks import forced_tokens
from inlay.engine.torch.hidden_states import StateReader
from inlay.engine.torch.plan import PartialPlan, ScheduledChunk
from inlay.engine.torch.sampling.chooser import ChosenTokens
from inlay.engine.torch.sampling.sampler import SampledToken
from inlay.engine.torch.sequence import Sequence
from inlay.errors import InlayError
from inlay.request import FinishReason

RISE = 0.1
"""Cost of one more row as a part of a step, until it has been measured."""

_COST_WEIGHT = 0.1
"""Weight of a new measurement in the average; the first ones of a size have more."""

_GAIN = 0.05
"""Drafts must give this part more tokens a second: to look for them costs time as well."""

_TRIED_ROWS = 4
_TRIED_SHARE = 0.25
"""A step may have so many rows, or such a part, more than the largest that has been measured."""

_COST_RETURN = 0.001
"""Part of the way back to `RISE` of sizes above a measured one: what was dear is tried again."""


class StepCosts:
    """Seconds of a decode step by its rows: moving averages of those that ran."""

    def __init__(self) -> None:
        self._seconds: dict[int, float] = {}
        self._measurements: Counter[int] = Counter()

    def learn(self, rows: int, seconds: float) -> None:
        """Take a measurement. One far off, as of a machine that stood still, counts little."""
        old = self._seconds.get(rows, 0.0)
        if not old:
            old = float(self._expected(np.array([rows]))[0]) if self._seconds else seconds
        self._measurements[rows] += 1
        weight = max(_COST_WEIGHT, 1 / (1 + self._measurements[rows]))
        now = old + weight * (min(seconds, 2 * old) - old)
        self._seconds[rows] = now
        for size, known in self._seconds.items():
            usual = now * (1 + RISE * max(0, size - rows) / rows)
            if size < rows:
                self._seconds[size] = min(known, usual)
            elif known > usual:
                self._seconds[size] = known + _COST_RETURN * (usual - known)

    def measured(self, rows: int) -> bool:
        """Return True if a step of `rows` rows has been measured."""
        return rows in self._seconds

    def drafts_tried(self, rows: int) -> int:
        """Return how many drafts a step of `rows` rows may have: few beyond what was measured.

        What more rows cost is learned at the price of a few.
        """
        largest = max(self._seconds, default=rows)
        return max(_TRIED_ROWS, largest + max(_TRIED_ROWS, int(_TRIED_SHARE * largest)) - rows)

    def relative(self, rows: int, more: int) -> NDArray[np.float64]:
        """Return the cost of steps of `rows` to `rows + more` rows, as float64 [more + 1].

        In steps of `rows` rows; never falling.
        """
        asked = np.arange(rows, rows + more + 1)
        if not self._seconds:
            return 1 + RISE * (asked - rows) / rows
        found = np.maximum.accumulate(np.maximum(self._expected(asked), 1e-9))
        return np.asarray(found / found[0])

    def pays(self, rows: int, chance: float, most: int) -> bool:
        """Return True if up to `most` drafts may pay, each accepted with `chance`."""
        more = np.arange(most + 1)
        gain = (1 + chance * more / rows) / self.relative(rows, most)
        return bool((gain > 1 + _GAIN).any())

    def _expected(self, asked: NDArray[np.int64]) -> NDArray[np.float64]:
        """Return seconds of steps of `asked` rows: between sizes by line, beyond them by `RISE`."""
        known = np.array(sorted(self._seconds))
        seconds = np.array([self._seconds[row] for row in known.tolist()])
        above, below = np.maximum(asked - known[-1], 0), np.maximum(known[0] - asked, 0)
        rise = RISE * (seconds[-1] * above / known[-1] - seconds[0] * below / known[0])
        return np.asarray(np.interp(asked, known, seconds) + rise)


def best_lengths(
    acceptance: Mapping[int, tuple[float, int]], rows: int, costs: StepCosts, room: int
) -> dict[int, int]:
    """Return how many drafts of each sequence give the most tokens a second.

    The j-th draft of a sequence whose drafts are accepted with probability a gives a^j tokens.
    Those with the highest chance are taken as long as tokens over cost rise.

    Args:
        acceptance: by key of a sequence: the probability a, and how many drafts there are.
        rows: rows of the step without drafts.
        costs: of steps.
        room: maximum number of drafts of all together.
    """
    chances = sorted(
        (
            (chance**place, key)
            for key, (chance, count) in acceptance.items()
            for place in range(1, count + 1)
        ),
        reverse=True,
    )[: max(0, room)]
    if not chances:
        return {}
    tokens = np.array(list(accumulate((chance for chance, _ in chances), initial=float(rows))))
    speed = tokens / costs.relative(rows, len(chances))
    best = int(np.argmax(speed))
    return _counted(key for _, key in chances[:best]) if speed[best] > (1 + _GAIN) * rows else {}


def _counted(keys: Iterable[int]) -> dict[int, int]:
    found: dict[int, int] = {}
    for key in keys:
        found[key] = found.get(key, 0) + 1
    return found


class Drafter(Protocol):
    """Guesses the next tokens of sequences that decode.

    May keep state of a sequence until `forget`.
    """

    def available(self, sequence: Sequence, limit: int) -> int:
        """Return how many drafts there are of `sequence`, at most `limit`.

        To be asked in every step for every sequence that decodes: a drafter may follow it so.
        """

    def draft(
        self, counts: Mapping[Sequence, int], room: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """Return drafts of sequences, right after `available` was asked for each.

        Args:
            counts: number of drafts of each, at most as many as are available; the pages of a
                sequence hold its drafts. Fewer may be returned.
            room: positions that may be computed for the drafts beside the drafts themselves.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of `sequence`, if any."""


PRIOR = 0.5
"""Probability that a draft is accepted, before anything is known."""

_PRIOR_WEIGHT = 0.02
"""Weight of one draft's fate in the moving average of all sequences, with which new ones begin."""

_WEIGHT = 0.1
"""Weight of one draft's fate in the moving average of a sequence."""

_RETURN = 0.01
"""Part of the way back to `PRIOR` in a step without drafts: what changed is tried again."""


@dataclass(slots=True)
class _Acceptance:
    """Acceptance of the drafts of a sequence.

    Attributes:
        chance: probability that a draft is.
        tried: True if it had drafts. Until then its chance moves with that of all.
    """

    chance: float
    tried: bool = False


def _moved(average: float, values: Iterable[float], weight: float) -> float:
    """Return a moving average after more values, each with `weight`."""
    for value in values:
        average += weight * (value - average)
    return average


@dataclass(slots=True)
class SpeculationCounts:
    """Totals since the start, under the names of vLLM's metrics.

    Attributes:
        drafts: chunks with drafts.
        draft_tokens: drafted tokens.
        accepted_tokens: those that became output.
        forced_draft_tokens: drafted tokens that a grammar forced.
        forced_accepted_tokens: those of them that became output.
    """

    drafts: int = 0
    draft_tokens: int = 0
    accepted_tokens: int = 0
    forced_draft_tokens: int = 0
    forced_accepted_tokens: int = 0


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


@dataclass(frozen=True, slots=True)
class _SparePages:
    """Pages for drafts of a step.

    Attributes:
        table: gives them.
        page_size: positions in a page.
        running: number of running sequences. Pages are left for each, which may need one in the
            next step.
    """

    table: PageTable
    page_size: int
    running: int

    def take(self, chunk: ScheduledChunk, count: int) -> int:
        """Grow the sequence of `chunk` for up to `count` drafts; return for how many it has."""
        runs = chunk.sequence.pages
        spare = max(0, self.table.available // len(runs) - self.running)
        room = (runs[0].end + spare) * self.page_size - chunk.start - 1
        count = min(count, max(0, room))
        stop = chunk.start + 1 + count
        self.table.grow(runs, max(0, -(-stop // self.page_size) - runs[0].end))
        return count


class Speculator:
    """Has tokens drafted, and learns how often they are accepted and what they cost.

    Where a grammar allows one id only, that is the draft, and needs no drafter: it becomes output,
    so it is always worth its row. Keeps state of a sequence until `forget`.

    Attributes:
        counts: totals.
        reader: gets hidden states of the served model, or None.
    """

    def __init__(
        self, drafter: Drafter | None, most: int, reader: StateReader | None = None
    ) -> None:
        """Start without knowledge of costs.

        Args:
            drafter: guesses what no grammar forces; None for nothing else.
            most: drafts of a sequence in a step, at most, that no grammar forces.
            reader: as the attribute.
        """
        self._drafter = drafter
        self._most = most
        self._forced: frozenset[Sequence] = frozenset()
        self.reader = reader
        self._costs = StepCosts()
        self._usual = PRIOR
        self._acceptance: dict[Sequence, _Acceptance] = {}
        self.counts = SpeculationCounts()

    def __len__(self) -> int:
        """Number of sequences with state."""
        return len(self._acceptance)

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of `sequence`, if any."""
        self._acceptance.pop(sequence, None)
        if self._drafter is not None:
            self._drafter.forget(sequence)

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
        pages = _SparePages(table, page_size, running)
        forced = forced_tokens(decoding)
        self._forced = frozenset(forced)
        for sequence, ids in forced.items():
            count = pages.take(decoding[sequence], min(len(ids), limits[sequence], plan.left))
            plan.add_drafts(sequence, ids[:count])
            limits[sequence] = 0
        if self._drafter is None:
            return
        rows = sum(chunk.count for chunk in plan.chunks.values())
        # Drafts may cost more than they give: what a step takes without them must be known.
        unknown = rows == len(plan.chunks) and not self._costs.measured(rows)
        paying = self._counts(self._drafter, limits, rows, 0 if unknown else plan.left)
        counts = {
            sequence: pages.take(decoding[sequence], count) for sequence, count in paying.items()
        }
        counts = {sequence: count for sequence, count in counts.items() if count}
        left = plan.left - sum(counts.values())
        for sequence, drafts in self._drafter.draft(counts, left).items():
            plan.add_drafts(sequence, drafts)

    def _counts(
        self, drafter: Drafter, limits: Mapping[Sequence, int], rows: int, room: int
    ) -> dict[Sequence, int]:
        """Return how many drafts of sequences that decode pay, without those of which none do."""
        sequences = list(limits)
        known = [
            self._acceptance.setdefault(sequence, _Acceptance(self._usual))
            for sequence in sequences
        ]
        room = min(room, self._costs.drafts_tried(rows))
        # In a full batch none pays, and nothing is looked for.
        most = min(room, self._most * len(sequences))
        best = max((each.chance for each in known), default=None)
        limit = 0 if best is None or not self._costs.pays(rows, best, most) else self._most
        chances = {
            place: (each.chance, drafter.available(sequence, min(limits[sequence], limit)))
            for place, (sequence, each) in enumerate(zip(sequences, known, strict=True))
        }
        counts = best_lengths(chances, rows, self._costs, room)
        for place, each in enumerate(known):
            if place not in counts:
                each.chance += _RETURN * (PRIOR - each.chance)
        return {sequences[place]: count for place, count in counts.items()}

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
        fates = [fate for chunk, run in runs.items() for fate in self._learn(chunk, run.accepted)]
        self._usual = _moved(self._usual, fates, _PRIOR_WEIGHT)
        for each in self._acceptance.values():
            if not each.tried:
                each.chance = _moved(each.chance, fates, _PRIOR_WEIGHT)
        return runs

    def _learn(self, chunk: ScheduledChunk, accepted: int) -> list[float]:
        """Record that the first `accepted` drafts of `chunk` became output.

        Returns 1 for each accepted guess and 0 for a wrong one.
        """
        drafted = len(chunk.drafts)
        self.counts.drafts += 1
        self.counts.draft_tokens += drafted
        self.counts.accepted_tokens += accepted
        if chunk.sequence in self._forced:
            self.counts.forced_draft_tokens += drafted
            self.counts.forced_accepted_tokens += accepted
            return []
        known = self._acceptance.get(chunk.sequence)
        if known is None:
            return []
        # The draft after the last accepted one was tried too; those behind it tell nothing.
        fates = [1.0] * accepted + [0.0] * (accepted < drafted)
        known.tried, known.chance = True, _moved(known.chance, fates, _WEIGHT)
        return fates

    def timed(self, chunks: Iterable[ScheduledChunk], seconds: float) -> None:
        """Learn from the time of a step, if all its sequences decoded."""
        if self._drafter is None:
            return
        rows = 0
        for chunk in chunks:
            if chunk.count != 1 + len(chunk.drafts):
                return
            rows += chunk.count
        self._costs.learn(rows, seconds)
