"""The cost of an expression, counted on its parsed form before anything is compiled.

llguidance matches by derivatives. What one byte costs is the alternatives of one derivative, and
the library's fuel is looked at only after it; runs of bytes without a choice are walked through
without fuel. Both are bounded by what is counted here.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from functools import reduce
from typing import NamedTuple

from inlay.base.errors import InvalidRequestError

MAX_STATES = 20_000
"""Of an expression."""

MAX_TRANSITIONS = 100_000
"""Of an expression: one derivative takes at most about 10 ms."""

MAX_WALK = 2_000_000
"""States that are visited while an expression's shortest match is read: about 0.5 s."""

MAX_INTERSECTION = 10_000
"""States that expressions which must all match may be in together."""

MAX_PARSING = 100_000_000
"""Items a parser compares for one character: about 0.1 s."""

MAX_ALL = 5
"""Expressions of the largest allowed size that one grammar may hold together."""

_ENDLESS = 1 << 40


class Cost(NamedTuple):
    """The size of one expression.

    Attributes:
        states: with repetitions written out.
        first: alternatives of its first derivative.
        transitions: alternatives of the derivatives of all its parts.
        width: states it can be in at once.
        shortest: length of its shortest match.
        longest: length of its longest match; `_ENDLESS` where there is none.
    """

    states: int = 0
    first: int = 0
    transitions: int = 0
    width: int = 0
    shortest: int = 0
    longest: int = 0

    @classmethod
    def literal(cls, length: int = 1) -> "Cost":
        """A text of `length` characters, each of one or of any in a class."""
        return cls(length, 1, 2 * length - 1, 1, length, length) if length else cls()

    @property
    def endings(self) -> int:
        """Different lengths of a match, at most."""
        return self.longest - self.shortest + 1

    def then(self, other: "Cost") -> "Cost":
        """This one and then `other`.

        Sequences are folded from their end: a derivative holds what of the rest may come next.
        """
        if not self.states or not other.states:
            return self if self.states else other
        first = 1 + (0 if self.shortest else other.first)
        together = min(other.states, self.endings * other.width)
        return Cost(
            self.states + other.states,
            first,
            self.transitions + other.transitions + first,
            max(self.width, other.width) if self.endings == 1 else self.width + together,
            self.shortest + other.shortest,
            min(_ENDLESS, self.longest + other.longest),
        )

    def repeated(self, low: int, high: int | None) -> "Cost":
        """At least `low` times, and at most `high` times or without an end."""
        if not self.states or high == 0:
            return Cost(self.states, 0, self.transitions) if self.states else self
        copies = max(low, high or 0, 1)
        return Cost(
            copies * self.states,
            self.first,
            # A copy is flattened into what follows it.
            copies * (self.transitions + self.first) + self.states,
            self.width if self.endings == 1 else copies * self.states,
            low * self.shortest,
            _ENDLESS if high is None else min(_ENDLESS, high * self.longest),
        )

    def negated(self) -> "Cost":
        """All that it does not match.

        States that can be held at once are told apart pair by pair.
        """
        pairs = self.width * self.width
        return Cost(self.states, self.first, self.transitions + pairs, pairs, 0, _ENDLESS)


def sequence(parts: Sequence[Cost]) -> Cost:
    """One after the other."""
    return reduce(lambda rest, part: part.then(rest), reversed(parts), Cost())


def alternatives(parts: Sequence[Cost]) -> Cost:
    """Any of them."""
    if len(parts) == 1:
        return parts[0]
    first = sum(part.first for part in parts)
    return Cost(
        sum(part.states for part in parts),
        first,
        sum(part.transitions for part in parts) + first,
        sum(part.width for part in parts),
        min(part.shortest for part in parts),
        max(part.longest for part in parts),
    )


def intersection(parts: Sequence[Cost]) -> Cost:
    """All of them at once.

    Raises `InvalidRequestError` when they can be in too many states together.
    """
    if len(parts) == 1:
        return parts[0]
    together = check_intersection(part.width for part in parts)
    return Cost(
        sum(part.states for part in parts),
        math.prod(max(1, part.first) for part in parts),
        sum(part.transitions for part in parts) + together,
        together,
        max(part.shortest for part in parts),
        min(part.longest for part in parts),
    )


def check_intersection(widths: Iterable[int]) -> int:
    """The product of the widths of expressions that must all match.

    Raises `InvalidRequestError` when it is too large.
    """
    wide = [width for width in widths if width > 1]
    product = math.prod(wide)
    if len(wide) > 1:
        _check(
            "expressions that must match together have", "states at once", product, MAX_INTERSECTION
        )
    return product


def check_expression(cost: Cost) -> Cost:
    """Return it. Raises `InvalidRequestError` for an expression that is too large."""
    for name, value, most in (
        ("states", cost.states, MAX_STATES),
        ("transitions", cost.transitions, MAX_TRANSITIONS),
        ("states to visit on the way to its shortest match", cost.width * cost.shortest, MAX_WALK),
    ):
        _check("an expression has", name, value, most)
    return cost


def check_all(costs: Iterable[Cost]) -> None:
    """Raise `InvalidRequestError` when the expressions of one grammar are too large together."""
    whole = alternatives([*costs, Cost()])
    _check("all expressions together have", "states", whole.states, MAX_ALL * MAX_STATES)
    _check(
        "all expressions together have", "transitions", whole.transitions, MAX_ALL * MAX_TRANSITIONS
    )


def check_rules(alternatives: Mapping[str, int], uses: Mapping[str, int], symbols: int) -> None:
    """Refuse rules by which one text can be read in very many ways.

    A parser that has read what a rule stands for goes on wherever that was expected, once for each
    alternative of the rule, and looks through all that it knows of this place whether it is new.

    Args:
        alternatives: of each rule.
        uses: of each rule in all rules.
        symbols: of all rules.

    Raises:
        InvalidRequestError: they are too ambiguous.
    """
    reads = sum(count * uses.get(name, 0) for name, count in alternatives.items())
    _check("its rules have", "items to compare for one character", reads * symbols, MAX_PARSING)


def _check(what: str, name: str, value: int, most: int) -> None:
    if value > most:
        # What came may have hundreds of digits.
        came = str(value) if value < _ENDLESS else "more than 10^12"
        raise InvalidRequestError(
            f"the grammar is too large: {what} {came} {name}; at most {most} are allowed"
        )
