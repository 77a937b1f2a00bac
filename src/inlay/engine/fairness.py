"""Shares of places in a batch, and of other resources, among clients.

With N clients a client's share is one N-th of a resource. A client beyond its share yields to one
within its own: max-min fairness with preemption. One client alone has a share of all.

A client's first sequence is within its share of places always: so a client keeps one running, and
gets one while there are as many places as clients.
"""

from collections import Counter
from collections.abc import Collection, Iterable
from typing import Generic, NamedTuple, Protocol, TypeVar

PROTECTED_TOKENS = 64
"""Output tokens for which a sequence that was passed over, or preempted, is not preempted."""

_IN_TURN = -1.0


class SequencePages(NamedTuple):
    """Pages of one sequence.

    Attributes:
        held: numbers of those it has, or would find cached if it started.
        lacking: how many more it has yet to take for its known positions.
    """

    held: Collection[int] = ()
    lacking: int = 0


class Sharing(Protocol):
    """A sequence, as shares are counted."""

    @property
    def client(self) -> str | None:
        """The client it belongs to."""

    @property
    def order(self) -> tuple[int, int]:
        """(priority, arrival), lower first; unique."""

    @property
    def is_protected(self) -> bool:
        """True if it runs beyond its client's share for a while."""


S = TypeVar("S", bound=Sharing)


def excess(used: int, total: int, num_clients: int) -> float:
    """Excess of a client that holds `used` of `total`, in shares: 0.0 within its share."""
    return max(0.0, used * num_clients / total - 1)


class Holdings(Protocol):
    """Amounts of one resource that clients hold."""

    def add(self, client: str | None, pages: SequencePages) -> None:
        """Count one more sequence."""

    def after(self, client: str | None, pages: SequencePages) -> int:
        """Amount that a client would hold with one more sequence."""


class PlaceHoldings:
    """Places in a batch, by client."""

    def __init__(self) -> None:
        self._counts: Counter[str | None] = Counter()

    def add(self, client: str | None, pages: SequencePages) -> None:
        self._counts[client] += 1

    def after(self, client: str | None, pages: SequencePages) -> int:
        return self._counts[client] + 1


class _Rank(NamedTuple):
    """Rank of a running sequence among those that keep what they have; unique."""

    priority: int
    over_share: float
    arrival: int


class Shares(Generic[S]):
    """Excess of each client over its share of one resource, at one moment.

    Excess is in shares: 0.0 within the share, 1.0 where a client has twice of it. Of a client's
    sequences those of better priority, then the earlier ones, fill the share: so its latest are in
    excess.

    Args:
        holdings: empty.
        total: amount there is of the resource.
        num_clients: clients that have a sequence running or waiting.
        running: sequences by (priority, arrival), with their pages.
        first_is_free: a client's first sequence is never in excess.

    Attributes:
        order: running sequences in the order in which they keep what they have: by priority, excess
            and arrival.
    """

    def __init__(
        self,
        holdings: Holdings,
        total: int,
        num_clients: int,
        running: Iterable[tuple[S, SequencePages]],
        *,
        first_is_free: bool,
    ) -> None:
        self._holdings = holdings
        self._total = total
        self._num_clients = num_clients
        self._first_is_free = first_is_free
        self._clients: set[str | None] = set()
        ranked: list[tuple[_Rank, S]] = []
        for sequence, pages in running:
            priority, arrival = sequence.order
            ranked.append((_Rank(priority, self.excess(sequence, pages), arrival), sequence))
            holdings.add(sequence.client, pages)
            self._clients.add(sequence.client)
        ranked.sort(key=lambda pair: pair[0])
        self._ranked = ranked
        self.order = [sequence for _, sequence in ranked]

    def excess(self, sequence: S, pages: SequencePages) -> float:
        """Excess of a sequence's client with that sequence as its next."""
        if sequence.client not in self._clients:
            if self._first_is_free:
                return 0.0
            if sequence.is_protected:
                return _IN_TURN
        used = self._holdings.after(sequence.client, pages)
        return excess(used, self._total, self._num_clients)

    def yielding(self, sequence: S, pages: SequencePages) -> list[S]:
        """Running sequences that make room for one that waits, the first to go first.

        These are all of worse priority; and, where its client stays within its share, those of
        other clients that are in excess.
        """
        priority, least = sequence.order[0], _IN_TURN if sequence.is_protected else 0.0
        some = [
            (rank, other)
            for rank, other in reversed(self._ranked)
            if rank.priority > priority
            or (
                rank.priority == priority
                and rank.over_share > least
                and other.client != sequence.client
            )
        ]
        if all(rank.priority > priority for rank, _ in some):
            return [other for _, other in some]  # whatever its own excess is, which takes long
        own = self.excess(sequence, pages)
        return [
            other
            for rank, other in some
            if rank.priority > priority or (own <= 0 and rank.over_share > own)
        ]


def shares_of_places(total: int, num_clients: int, sequences: Iterable[S]) -> Shares[S]:
    """Shares of places in a batch. A client's first sequence is never in excess."""
    pairs = ((sequence, SequencePages()) for sequence in sequences)
    return Shares(PlaceHoldings(), total, num_clients, pairs, first_is_free=True)
