"""`Speculator`: drafts for the decoding sequences of a step, as many as pay."""

from collections import Counter
from collections.abc import Hashable, Iterable, Mapping
from dataclasses import dataclass
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
        self._forced = frozenset()
        if not any(limits.values()):
            # All compute prompts, or end with this step.
            if self._drafter is not None:
                self._drafter.draft({}, plan.left)
            return
        by_client: Counter[Hashable] = Counter()
        for sequence, chunk in plan.chunks.items():
            by_client[sequence.client] += chunk.count
        shared, rows = len(by_client) > 1, by_client.total()
        # Drafts may cost more than they give: what a step takes without them must be known.
        decodes = rows == len(plan.chunks)
        unknown = decodes and not self._costs.measured(rows, lately=shared)
        bound = [sequence for sequence in decoding if sequence.grammar is not None]
        forced = forced_tokens(bound) if bound and not (unknown and shared) else {}
        self._forced = frozenset(forced)
        # By sequence: the chance of a draft, and how many pay.
        wanted = {
            sequence: (1.0, min(len(ids), limits[sequence])) for sequence, ids in forced.items()
        }
        if self._drafter is not None:
            certain = sum(count for _, count in wanted.values())
            room = 0 if unknown and not forced else plan.left - certain
            limits.update(dict.fromkeys(forced, 0))
            wanted |= self._guesses(self._drafter, limits, rows + certain, room)
        most = self._costs.drafts_tried(rows) if shared and decodes else plan.left
        counts = self._shared(wanted, by_client, min(most, plan.left))
        pages = _SparePages(table, page_size, running)
        counts = {
            sequence: pages.take(decoding[sequence], count) for sequence, count in counts.items()
        }
        for sequence, ids in forced.items():
            plan.add_drafts(sequence, ids[: counts.pop(sequence)])
        if self._drafter is not None:
            counts = {sequence: count for sequence, count in counts.items() if count}
            left = plan.left - sum(counts.values())
            for sequence, drafts in self._drafter.draft(counts, left).items():
                plan.add_drafts(sequence, drafts)

    def _shared(
        self,
        wanted: Mapping[Sequence, tuple[float, int]],
        by_client: Mapping[Hashable, int],
        room: int,
    ) -> dict[Sequence, int]:
        """Return how many drafts sequences have in a step of `by_client` rows without them."""
        asked = [(sequence.client, *of) for sequence, of in wanted.items()]
        return dict(zip(wanted, shared_lengths(asked, by_client, self._costs, room), strict=True))

    def _guesses(
        self, drafter: Drafter, limits: Mapping[Sequence, int], rows: int, room: int
    ) -> dict[Sequence, tuple[float, int]]:
        """Return the chance of a guess, and how many pay, of sequences of which any does."""
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
