"""Shares of the KV pages among clients, and turns of sequences that need more than a share.

Shares are those of `inlay.engine.fairness`. A client's first sequence may need more pages than a
share has, and then it takes turns with the others: once it was passed over for `STARVED` steps
without a token it takes pages of anybody, and keeps them until it has made `PROTECTED_TOKENS`
tokens.
"""

from collections import Counter
from collections.abc import Callable, Iterable, Sized

from inlay.engine.fairness import PROTECTED_TOKENS, SequencePages, Shares, shares_of_places
from inlay.engine.torch.cache.kv_layout import EngineLimits
from inlay.engine.torch.cache.table import PageTable
from inlay.engine.torch.sequence import Sequence

STARVED = 256
"""Steps without a token after which a passed-over first sequence of a client has its turn."""


class PageHoldings:
    """Pages, by client; those that several sequences of a client share count once."""

    def __init__(self) -> None:
        self._held: dict[str | None, set[int]] = {}
        self._lacking: Counter[str | None] = Counter()

    def add(self, client: str | None, pages: SequencePages) -> None:
        self._held.setdefault(client, set()).update(pages.held)
        self._lacking[client] += pages.lacking

    def after(self, client: str | None, pages: SequencePages) -> int:
        held = self._held.get(client, set())
        new = len(pages.held) - (len(held.intersection(pages.held)) if held else 0)
        return len(held) + new + self._lacking[client] + pages.lacking


def shares_of_pages(
    total: int, num_clients: int, running: Iterable[tuple[Sequence, int]]
) -> Shares[Sequence]:
    """Shares of pages; with each running sequence comes the number of pages it has yet to take."""
    pairs = (
        (sequence, SequencePages([page for run in sequence.pages for page in run.pages], lacking))
        for sequence, lacking in running
    )
    return Shares(PageHoldings(), total, num_clients, pairs, first_is_free=False)


class StepShares:
    """Shares of places and pages, computed once for each set of running sequences.

    Args:
        bounds: number of places and pages.
        clients: those that have a sequence running or waiting.
        running: sequences, by order; it changes.
        outstanding: pages that a running sequence has yet to take.

    Attributes:
        stale: True where they are computed anew: a sequence started or stopped, or a step begins.
    """

    def __init__(
        self,
        bounds: EngineLimits,
        clients: Sized,
        running: list[Sequence],
        outstanding: Callable[[Sequence], int],
    ) -> None:
        self._bounds = bounds
        self._clients = clients
        self._running = running
        self._outstanding = outstanding
        self.stale = False
        self._places: Shares[Sequence] | None = None
        self._pages: Shares[Sequence] | None = None

    @property
    def places(self) -> Shares[Sequence]:
        """Of places, among the running sequences."""
        self._drop_stale()
        if self._places is None:
            self._places = self.of_places(self._running)
        return self._places

    @property
    def pages(self) -> Shares[Sequence]:
        """Of pages, among the running sequences."""
        self._drop_stale()
        if self._pages is None:
            lacking = [(sequence, self._outstanding(sequence)) for sequence in self._running]
            self._pages = shares_of_pages(self._bounds.num_pages, len(self._clients), lacking)
        return self._pages

    def _drop_stale(self) -> None:
        if self.stale:
            self._places = self._pages = None
            self.stale = False

    def of_places(self, sequences: Iterable[Sequence]) -> Shares[Sequence]:
        """Of places, among other sequences."""
        return shares_of_places(self._bounds.max_num_seqs, len(self._clients), sequences)

    def preemptible_for_slot(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences that would give their place to `sequence`, the first to go first."""
        if len(self._clients) == 1 and self._running[-1].order[0] <= sequence.order[0]:
            return self._unread_before(sequence)
        return self.places.yielding(sequence, SequencePages()) or self._unread_before(sequence)

    def preemptible_for_pages(self, sequence: Sequence, pages: SequencePages) -> list[Sequence]:
        """Running sequences that would give their pages to `sequence`, likewise."""
        found = self.pages.yielding(sequence, pages)
        return found + [one for one in self._unread_before(sequence) if one not in found]

    def preempted_for(
        self, sequence: Sequence, pages: SequencePages, short: int, table: PageTable, *, full: bool
    ) -> list[Sequence] | None:
        """Return those to preempt until a waiting sequence has a place and pages; None: never.

        Args:
            sequence: waiting.
            pages: that it would find, and take.
            short: pages that it lacks even if those that it finds are in use.
            table: of the pages.
            full: it lacks a place, too.
        """
        chosen = self.preemptible_for_slot(sequence)[:1] if full else []
        others = None if full else self.preemptible_for_pages(sequence, pages)
        if others is not None and short > sum(map(self._most_gained, others)):
            return None  # without a look at each page
        missing = short + table.num_unreferenced(pages.held)
        gain = PreemptionGain(table)
        for other in chosen:
            gain.add(other, self._outstanding(other))
        if missing <= gain.pages:
            return chosen
        for other in self.preemptible_for_pages(sequence, pages) if others is None else others:
            if other not in chosen:
                chosen.append(other)
                gain.add(other, self._outstanding(other))
                if missing <= gain.pages:
                    return chosen
        return None

    def _most_gained(self, sequence: Sequence) -> int:
        return self._outstanding(sequence) + sum(len(run.pages) for run in sequence.pages)

    def _unread_before(self, sequence: Sequence) -> list[Sequence]:
        """Running sequences that are paused, if `sequence` has run before.

        The reader for which one of them waits may wait for a place that the reader of `sequence`
        has: whatever their order, neither would go on.
        """
        if not sequence.preemptions:
            return []
        return [other for other in reversed(self._running) if other.paused]


class PreemptionGain:
    """Pages that are there for others once some sequences are preempted."""

    def __init__(self, table: PageTable) -> None:
        self.pages = 0
        self._table = table
        self._holders: Counter[int] = Counter()

    def add(self, sequence: Sequence, outstanding: int) -> None:
        """Count one more: the pages it has yet to take, and those that no other holds now."""
        self.pages += outstanding
        for run in sequence.pages:
            for page in run.pages:
                self._holders[page] += 1
                self.pages += self._holders[page] == self._table.references(page)


def count_starved_step(sequence: Sequence) -> None:
    """Count a step in which a sequence wanted to go on and could not; in time it gets its turn.

    A background sequence gets none.
    """
    if sequence.is_background:
        return
    sequence.starved_steps += 1
    sequence.waited += 1
    if sequence.waited == STARVED:
        sequence.protected_until = len(sequence.output) + PROTECTED_TOKENS
