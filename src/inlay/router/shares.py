"""The one rule for several sets of weights under one name: which share of requests each takes.

It looks at cards alone, in no order, so every frontend computes the same.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from inlay.messages.card import ModelCard
from inlay.messages.request import Task


class Weights(NamedTuple):
    """Traits that workers must share to answer alike."""

    name: str
    weights_id: str
    dtype: str
    outputs: tuple[str, ...] = ()

    @classmethod
    def of(cls, card: ModelCard) -> "Weights":
        """Of a worker."""
        return cls(card.name, card.weights_id, card.dtype, card.outputs)

    def __str__(self) -> str:
        return f"{self.weights_id} ({', '.join((self.dtype, *self.outputs))})"


class _Candidate:
    """The ready workers with the same weights, and what they ask for together.

    Where they say different things, the greatest minimum and the greatest weight hold.
    """

    def __init__(self, weights: Weights, cards: Sequence[ModelCard]) -> None:
        said = [card.rollout for card in cards]
        self.weights = weights
        self.ready = sum(not card.asleep for card in cards)
        self.since = min(one.since for one in said)
        self.min = max((one.min_workers for one in said if one.min_workers), default=None)
        self.weight = max((one.weight for one in said if one.weight is not None), default=None)

    def replaces(self, older: "_Candidate") -> bool:
        return self.ready >= (older.ready + 1 if self.min is None else self.min)


def shares_of(cards: Iterable[ModelCard]) -> dict[Weights, float]:
    """The share of each set of weights in the requests for one name; they add up to 1, or to 0.

    Without explicit weights one set takes all: the one that has been there longest, until a newer
    one has as many ready workers as it asks for; if it asks for no number, more than the older one.

    Those with an explicit weight, once they have as many workers as they ask for, share with that
    one, whose weight is 1. Sleeping workers are not ready, but hold the name where no other does.

    Args:
        cards: of the workers that are ready and called so.
    """
    grouped: dict[Weights, list[ModelCard]] = {}
    for card in cards:
        grouped.setdefault(Weights.of(card), []).append(card)
    every = [_Candidate(weights, found) for weights, found in grouped.items()]
    weight: dict[Weights, float] = {
        one.weights: one.weight
        for one in every
        if one.weight is not None and one.ready >= (one.min or 1)
    }
    if ruled := [one for one in every if one.weight is None and one.ready]:
        weight[_in_place(ruled).weights] = 1.0
    if not any(weight.values()):
        able = [one for one in every if one.weight != 0]
        weight = {_in_place(able).weights: 1.0} if able else {}
    total = sum(sorted(weight.values()))
    return {one: weight.get(one, 0.0) / (total or 1.0) for one in sorted(grouped)}


def _in_place(candidates: Sequence[_Candidate]) -> _Candidate:
    place, *newer = sorted(candidates, key=lambda one: (one.since, one.weights))
    for one in newer:
        if one.replaces(place):
            place = one
    return place


def leader(shares: Mapping[Weights, float]) -> Weights:
    """The weights with the largest share: those that are shown for the name."""
    return min(shares, key=lambda one: (-shares[one], one))


def drawn(shares: Mapping[Weights, float], number: float) -> Weights:
    """The weights for one request, by a random `number` from 0 to below 1."""
    for one, share in shares.items():
        number -= share
        if number < 0:
            return one
    return leader(shares)


def called(cards: Iterable[ModelCard], name: str, task: Task | None = None) -> list[ModelCard]:
    """The cards that a request for this name is between.

    Those that do the `task` and nothing else come before those that do it too; workers that only
    encode media are beside the model, unless there is nothing else.
    """
    found = [card for card in cards if name == card.name or name in card.aliases]
    first = [card for card in found if card.role is not Task.ENCODE]
    if task is not None:
        able = [card for card in found if task in card.tasks]
        return [card for card in able if card.role is task] or able or first or found
    return first or found


class Called:
    """The workers that requests for a name, and a task, are between.

    Args:
        ready: cards of workers that are connected here.
        announced: cards of ready workers as all frontends hear of them.
        name: of the model, or an alias.
        task: as for `called`.

    Attributes:
        shares: each set of weights that is ready here, and its share of requests.
        cards: by weights, the card that stands for all workers that have them. Where they differ it
            is of one that accepts rows: requests with rows go to those.
        base: the card that stands for the name, once somebody has asked.
    """

    __slots__ = ("base", "cards", "shares")

    def __init__(
        self,
        ready: Sequence[ModelCard],
        announced: Sequence[ModelCard],
        name: str,
        task: Task | None,
    ) -> None:
        cards, told = called(ready, name, task), called(announced, name, task)
        self.base: ModelCard | None = None
        self.cards: dict[Weights, ModelCard] = {}
        for card in cards:
            standing = self.cards.setdefault(Weights.of(card), card)
            if card.prompt_embeds is None or standing.prompt_embeds is not None:
                self.cards[Weights.of(card)] = card
        shares = {one: share for one, share in shares_of(told).items() if one in self.cards}
        if not any(shares.values()):
            shares = shares_of([card for card in told if Weights.of(card) in self.cards] or cards)
        total = sum(shares.values())
        self.shares = {one: share / (total or 1.0) for one, share in shares.items()}
