"""Shares of the KV pages among clients, and turns of sequences that need more than a share.

Shares are those of `inlay.engine.fairness`. A client's first sequence may need more pages than a
share has, and then it takes turns with the others: once it was passed over for `STARVED` steps
without a token it takes pages of anybody, and keeps them until it has made `TURN` tokens.
"""

from collections import Counter
from collections.abc import Iterable

from inlay.engine.fairness import TURN, Pages, Shares
from inlay.engine.torch.sequence import Sequence

STARVED = 256
"""Steps without a token after which a passed-over first sequence of a client has its turn."""


class PageHoldings:
    """Pages, by client; those that several sequences of a client share count once."""

    def __init__(self) -> None:
        self._held: dict[str | None, set[int]] = {}
        self._lacking: Counter[str | None] = Counter()

    def add(self, client: str | None, pages: Pages) -> None:
        """As `inlay.engine.fairness.Holdings`."""
        self._held.setdefault(client, set()).update(pages.held)
        self._lacking[client] += pages.lacking

    def after(self, client: str | None, pages: Pages) -> int:
        """As `inlay.engine.fairness.Holdings`."""
        held = self._held.get(client, set())
        new = len(pages.held) - len(held.intersection(pages.held))
        return len(held) + new + self._lacking[client] + pages.lacking


def shares_of_pages(
    total: int, num_clients: int, running: Iterable[tuple[Sequence, int]]
) -> Shares[Sequence]:
    """Shares of pages; with each running sequence comes the number of pages it has yet to take."""
    pairs = (
        (sequence, Pages([page for run in sequence.pages for page in run.pages], lacking))
        for sequence, lacking in running
    )
    return Shares(PageHoldings(), total, num_clients, pairs, first_is_free=False)


def pass_over(sequence: Sequence) -> None:
    """Count a step in which a sequence wanted to go on and could not; in time it gets its turn."""
    sequence.starved_steps += 1
    sequence.waited += 1
    if sequence.waited == STARVED:
        sequence.turn_ends = len(sequence.output) + TURN


__all__ = ["STARVED", "pass_over", "shares_of_pages"]
