"""`Speculator`: drafts for the decoding sequences of a step, as many as pay."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
from operator import attrgetter
from typing import Protocol

from inlay.engine.torch.cache.table import PageTable
from inlay.engine.torch.grammar.masks import forced_tokens
from inlay.engine.torch.hidden_states import StateReader
from inlay.engine.torch.plan import PartialPlan, ScheduledChunk
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation.costs import StepCosts, best_lengths, shared_lengths


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


_CHANCE = attrgetter("chance")


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
        runs, first = chunk.sequence.pages, chunk.start + 1
        end = runs[0].end
        if first + count <= end * self.page_size:
            return count
        spare = max(0, self.table.available // len(runs) - self.running)
        count = min(count, max(0, (end + spare) * self.page_size - first))
        self.table.grow(runs, max(0, -(-(first + count) // self.page_size) - end))
        return count


class Speculator:
    """Has tokens drafted, and learns how often they are accepted and what they cost.

    Where a grammar allows one id only, that is the draft, and needs no drafter: it becomes output,
    so it is always worth its row. Where clients share a step, drafts of one keep the others waiting
    by a bounded part of it. Keeps state of a sequence until `forget`.

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
        by_client: Counter[Hashable] = Counter()
        decoding: dict[Sequence, ScheduledChunk] = {}
        limits: dict[Sequence, int] = {}
        bound: list[Sequence] = []
        for sequence, chunk in plan.chunks.items():
            by_client[sequence.client] += chunk.count
            sampling = sequence.sampling
            # Hidden states are not recorded of drafts.
            if chunk.samples and chunk.count == 1 and sampling.hidden_states is None:
                decoding[sequence] = chunk
                limits[sequence] = min(plan.left, sampling.max_tokens - len(sequence.output) - 1)
                if sequence.grammar is not None:
                    bound.append(sequence)
        self._forced = frozenset()
        if not any(limits.values()):
            # All compute prompts, or end with this step.
            if self._drafter is not None:
                self._drafter.draft({}, plan.left)
            return
        shared, rows = len(by_client) > 1, by_client.total()
        # Drafts may cost more than they give: what a step takes without them must be known.
        decodes = rows == len(plan.chunks)
        unknown = decodes and not self._costs.measured(rows, lately=shared)
        forced = forced_tokens(bound) if bound and not (unknown and shared) else {}
        self._forced = frozenset(forced)
        # By sequence: the chance of a draft, and how many pay.
        wanted: dict[Sequence, tuple[float, int]] = {}
        certain = 0
        for sequence, ids in forced.items():
            count = min(len(ids), limits[sequence])
            wanted[sequence] = 1.0, count
            certain += count
            limits[sequence] = 0
        if self._drafter is not None:
            room = 0 if unknown and not forced else plan.left - certain
            wanted |= self._guesses(self._drafter, limits, rows + certain, room)
        most = self._costs.drafts_tried(rows) if shared and decodes else plan.left
        pages = _SparePages(table, page_size, running)
        guessed: dict[Sequence, int] = {}
        asked = [(sequence.client, *of) for sequence, of in wanted.items()]
        counts = shared_lengths(asked, by_client, self._costs, min(most, plan.left))
        for sequence, count in zip(wanted, counts, strict=True):
            count = pages.take(decoding[sequence], count) if count else 0
            if sequence in forced:
                plan.add_drafts(sequence, forced[sequence][:count])
            elif count:
                guessed[sequence] = count
        if self._drafter is not None:
            left = plan.left - sum(guessed.values())
            for sequence, drafts in self._drafter.draft(guessed, left).items():
                plan.add_drafts(sequence, drafts)

    def _guesses(
        self, drafter: Drafter, limits: Mapping[Sequence, int], rows: int, room: int
    ) -> dict[Sequence, tuple[float, int]]:
        """Return the chance of a guess, and how many pay, of sequences of which any does."""
        sequences, known = list(limits), []
        for sequence in sequences:
            each = self._acceptance.get(sequence)
            if each is None:
                each = self._acceptance[sequence] = _Acceptance(self._usual)
            known.append(each)
        room = min(room, self._costs.drafts_tried(rows))
        # In a full batch none pays, and nothing is looked for.
        most = min(room, self._most * len(sequences))
        best = max(map(_CHANCE, known), default=0.0)
        limit = self._most if self._costs.pays(rows, best, most) else 0
        chances: dict[int, tuple[float, int]] = {}
        for place, sequence in enumerate(sequences):
            count = drafter.available(sequence, min(limits[sequence], limit))
            chances[place] = known[place].chance, count
        counts = best_lengths(chances, rows, self._costs, room)
        for place, each in enumerate(known):
            if place not in counts:
                each.chance += _RETURN * (PRIOR - each.chance)
        return {sequences[place]: (known[place].chance, count) for place, count in counts.items()}

    def learn(self, accepted: Mapping[ScheduledChunk, int]) -> None:
        """Learn how many of the drafts of chunks became output."""
        fates = [fate for chunk, count in accepted.items() for fate in self._learn(chunk, count)]
        self._usual = _moved(self._usual, fates, _PRIOR_WEIGHT)
        for each in self._acceptance.values():
            if not each.tried:
                each.chance = _moved(each.chance, fates, _PRIOR_WEIGHT)

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
        rows, drafts = 0, False
        for chunk in chunks:
            if chunk.count != 1 + len(chunk.drafts):
                return
            rows += chunk.count
            drafts |= bool(chunk.drafts)
        self._costs.learn(rows, seconds, drafts=drafts)
