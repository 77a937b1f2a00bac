"""Values by patterns of module names: `rank_pattern` and `alpha_pattern` of PEFT.

An adapter's files are untrusted, and a regular expression goes back to try each of its
alternatives. What patterns cost is bounded before one is compiled or compared.
"""

import math
import re
from itertools import takewhile
from typing import NamedTuple

from inlay.base.errors import InvalidRequestError

MAX_PATTERNS, MAX_CHARACTERS = 4096, 128 * 1024
"""Patterns of an adapter at most, and their characters: up to 0.4 s to compile."""
MAX_STEPS = 1 << 27
"""Steps of all comparisons of an adapter's patterns with its modules' names: up to 0.2 s."""

_MAX_PATTERN = 512
_MAX_WAYS = 256
"""Ways to read a pattern by its alternatives: all are tried before a name does not match."""
_BEGUN, _LOOKED, _SLOW = 32, 96, 8
"""Steps of a pattern before its first character, of the look at a name's ends, and of an escape or
a group: as they were measured, 1 to 2 ns each.
"""

_pattern = re.compile(r"[\w.^$|()\[\]\\-]+")
"""Module name patterns without repetition: matching cannot take long (ReDoS)."""
_single = re.compile(r"\\.|\[\^?\]?(?:\\.|[^\]\\])*\]", re.DOTALL)


class PatternWork:
    """Cost of the patterns of one adapter so far, of all its configurations together.

    A step is a character of a pattern, for each way to read it and each part of a name where it
    may begin.
    """

    def __init__(self) -> None:
        self._patterns = self._characters = self._steps = 0

    def compile(self, key: str) -> None:
        """Count a pattern that will be compiled. Raises `InvalidRequestError`."""
        self._patterns += 1
        self._characters += len(key)
        if self._patterns > MAX_PATTERNS or self._characters > MAX_CHARACTERS:
            raise InvalidRequestError(
                f"rank_pattern and alpha_pattern have more than {MAX_PATTERNS} patterns, or more "
                f"than {MAX_CHARACTERS} characters in them"
            )

    def compare(self, steps: int) -> None:
        """Count steps that will be done. Raises `InvalidRequestError`."""
        self._steps += steps
        if self._steps > MAX_STEPS:
            raise InvalidRequestError(
                "rank_pattern and alpha_pattern take too long to compare with the names of the "
                f"adapter's modules: over {MAX_STEPS} steps, one for each character of a pattern, "
                "way to read it and part of a name where it may begin; give fewer patterns, or "
                "fewer alternatives in them"
            )


class _Choice(NamedTuple):
    place: int
    regex: re.Pattern[str]
    value: float


class _Group:
    """Patterns that match nothing but names of which a part has one beginning, the last one end."""

    def __init__(self) -> None:
        self.choices: list[_Choice] = []
        self.steps = 0


class Patterns:
    """Values by pattern; the first that matches a name counts.

    Args:
        work: of the adapter.
    """

    def __init__(self, work: PatternWork | None = None) -> None:
        self._work = work or PatternWork()
        self._groups: dict[tuple[str, str], _Group] = {}
        self._count = 0

    def add(self, name: str, key: str, value: float) -> None:
        """Add a pattern of the field `name`, behind the others.

        Raises:
            InvalidRequestError: it is malformed, repeats something, or costs too much.
        """
        # Of a long one even the product is a long number.
        ways = ways_of(key) if len(key) <= _MAX_PATTERN else 0
        if not 0 < ways <= _MAX_WAYS or not _pattern.fullmatch(key):
            raise InvalidRequestError(
                f"{name} has the pattern {repr(key)[:80]}; a pattern has at most {_MAX_PATTERN} "
                f"letters, digits and ._^$|()[]\\-, at most {_MAX_WAYS} ways to choose between "
                "its alternatives, and repeats nothing"
            )
        self._work.compile(key)
        try:
            # As PEFT's get_pattern_key.
            regex = re.compile(rf"(.*\.)?({key})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise InvalidRequestError(
                f"{name} has the pattern {repr(key)[:80]}: {error}"
            ) from error
        group = self._groups.setdefault(_ends_of(key), _Group())
        group.choices.append(_Choice(self._count, regex, value))
        slow = key.count("\\") + key.count("(")
        group.steps += ways * (_BEGUN + len(key) + _SLOW * slow)
        self._count += 1

    def first(self, module: str, default: float) -> float:
        """Return the value of the first pattern that matches, or `default`.

        Raises:
            InvalidRequestError: the adapter's patterns have cost too much by now.
        """
        parts = f".{module}"
        steps = (_LOOKED + len(parts) // 8) * len(self._groups)
        groups = []
        for (begin, end), group in self._groups.items():
            places = parts.count(begin)
            if places and parts.endswith(end):
                groups.append(group)
                steps += places * group.steps + len(group.choices) * len(parts)
        self._work.compare(steps)
        found = (
            next((each for each in group.choices if each.regex.match(module)), None)
            for group in groups
        )
        first = min(filter(None, found), key=lambda choice: choice.place, default=None)
        return default if first is None else first.value


def ways_of(key: str) -> int:
    """Return a bound of the ways to read a pattern by its alternatives."""
    return math.prod(part.count("|") + 1 for part in key.split(")"))


def _ends_of(key: str) -> tuple[str, str]:
    """Return what a part of each name begins with that a pattern matches, and the name's end.

    The first with the dot before it. As far as that is easily seen: "." and "" are of all names.
    """
    depth = 0
    for each in _single.sub("", key):
        depth += (each == "(") - (each == ")")
        if each == "|" and not depth:
            return ".", ""
    begin, end = _word(key.removeprefix("^")), _word(key[::-1])[::-1]
    escaped = key.removesuffix(end).endswith("\\")
    return f".{begin}", "" if escaped else end


def _word(text: str) -> str:
    return "".join(takewhile(lambda each: each.isalnum() or each in "_-", text))
