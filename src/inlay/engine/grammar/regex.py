"""The cost of a regular expression as Rust's `regex-syntax` reads it, which llguidance does."""

import re

from inlay.base.errors import InvalidRequestError
from inlay.engine.grammar.cost import (
    Cost,
    alternatives,
    check_expression,
    intersection,
    sequence,
)

MAX_DEPTH = 64
"""Groups in each other, and levels of a JSON schema."""

LARGE_CLASS = 200
"""States of a class of many Unicode ranges, which are made once however often it comes."""

# White space is allowed inside of the braces.
_COUNT = re.compile(r"\{\s*+([0-9]*+)\s*+(?:(,)\s*+([0-9]*+)\s*+)?\}")
_GROUP = re.compile(r"\?(?:P?<[^>]*>|([A-Za-z-]*)(:|\)))")
_PLAIN = re.compile(r"[^\\\[\](){}*+?|.^$]+")
_LARGE = re.compile(r"\\[pPwWdD]")
_MAX_DIGITS = 20
_TIMES: dict[str, tuple[int, int | None]] = {"*": (0, None), "+": (1, None), "?": (0, 1)}


class Tree:
    """The cost of an expression that is read from left to right, group by group.

    Raises (all methods):
        InvalidRequestError: too many groups lie in each other, or what must match together is
            too large.
    """

    def __init__(self) -> None:
        # For each open group its alternatives, of each what must match together, and of those the
        # sequence.
        self._groups: list[list[list[list[Cost]]]] = [[[[]]]]
        self._last: list[Cost] = []

    def add(self, cost: Cost) -> None:
        """Add what comes next in the sequence."""
        self._groups[-1][-1][-1] += self._last
        self._last = [cost]

    def open(self) -> None:
        """Begin a group."""
        self.add(Cost())
        self._groups.append([[[]]])
        self._last = []
        if len(self._groups) > MAX_DEPTH:
            raise InvalidRequestError(
                f"an expression is nested too deeply: at most {MAX_DEPTH} groups may lie in each "
                "other"
            )

    def close(self) -> None:
        """A group ends. A plain sequence stays one, as the library flattens it."""
        if len(self._groups) == 1:
            return
        self._end()
        group = self._groups.pop()
        self._last = group[0][0] if len(group) == 1 and len(group[0]) == 1 else [_fold(group)]

    def alternative(self) -> None:
        """Begin another alternative of this group."""
        self._end()
        self._groups[-1].append([[]])

    def together(self) -> None:
        """Begin what must match together with what came before it in this alternative."""
        self._end()
        self._groups[-1][-1].append([])

    def repeat(self, low: int, high: int | None) -> None:
        """Repeat what came last."""
        if (low, high) != (1, 1):
            self._last = [sequence(self._last).repeated(low, high)]

    def cost(self) -> Cost:
        """Of all, at the end."""
        while len(self._groups) > 1:
            self.close()
        self._end()
        return _fold(self._groups[0])

    def _end(self) -> None:
        self._groups[-1][-1][-1] += self._last
        self._last = []


def _fold(group: list[list[list[Cost]]]) -> Cost:
    return alternatives([intersection([sequence(parts) for parts in both]) for both in group])


def cost_of_regex(regex: str) -> Cost:
    """The cost of an expression.

    One that is not well formed has any: the library says best what is wrong with it.

    Raises:
        InvalidRequestError: it is nested too deeply, or has the flag x.
    """
    tree = Tree()
    large: set[str] = set()
    place = 0
    while place < len(regex):
        if plain := _PLAIN.match(regex, place):
            if len(plain[0]) > 1:
                tree.add(Cost.literal(len(plain[0]) - 1))
            tree.add(Cost.literal())
            place = plain.end()
            continue
        character = regex[place]
        place += 1
        if character == "\\":
            braced = (
                regex[place : place + 1] in set("pPxuU") and regex[place + 1 : place + 2] == "{"
            )
            end = regex.find("}", place) if braced else -1
            start, place = place - 1, end + 1 if end >= 0 else place + 1
            large.update(_large(regex[start:place]))
            tree.add(Cost.literal())
        elif character == "[":
            start, place = place - 1, _class_end(regex, place)
            large.update(_large(regex[start:place]))
            tree.add(Cost.literal())
        elif character == "(":
            place = _group(regex, place, tree)
        elif character == ")":
            tree.close()
        elif character == "|":
            tree.alternative()
        elif character in _TIMES:
            tree.repeat(*_TIMES[character])
        elif character == "{" and (count := _COUNT.match(regex, place - 1)):
            low, comma, high = count.groups()
            tree.repeat(*counted(low, comma, high))
            place = count.end()
        elif character not in "^$":
            tree.add(Cost.literal())
    cost = tree.cost()
    return cost._replace(states=cost.states + LARGE_CLASS * len(large))


def check_regex(regex: str) -> Cost:
    """The cost of an expression. Raises `InvalidRequestError` when it is too large."""
    return check_expression(cost_of_regex(regex))


def counted(low: str, comma: str | None, high: str | None) -> tuple[int, int | None]:
    """The least and the most of `{low}`, `{low,}` or `{low,high}`."""
    least = _number(low)
    return least, (_number(high) if high else None) if comma else least


def _number(text: str) -> int:
    """The number without its sign; one of very many digits stands for more than any bound."""
    digits = text.lstrip("+-")
    return int(digits or 0) if len(digits) <= _MAX_DIGITS else 10**_MAX_DIGITS


def _group(regex: str, place: int, tree: Tree) -> int:
    """Begin the group whose `(` is before `place`.

    The place behind what says of which kind it is.
    """
    found = _GROUP.match(regex, place)
    if found is None:
        tree.open()
        return place
    flags, end = found[1], found[2]
    if flags and "x" in flags:
        raise InvalidRequestError("the flag x of regular expressions is not supported")
    if end != ")":
        tree.open()
    return found.end()


def _large(text: str) -> tuple[str, ...]:
    """The class, if it is one of many ranges."""
    return (text,) if _LARGE.search(text) else ()


def _class_end(regex: str, place: int) -> int:
    """The place behind the character class whose `[` is before `place`."""
    depth = 1
    if regex.startswith("^", place):
        place += 1
    if regex.startswith("]", place):
        place += 1
    while place < len(regex) and depth:
        character = regex[place]
        place += 2 if character == "\\" else 1
        depth += (character == "[") - (character == "]")
    return place
