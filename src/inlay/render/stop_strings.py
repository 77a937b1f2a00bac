"""Stop strings in a text that arrives in pieces."""

import re
from collections.abc import Iterable

from inlay.base.errors import InvalidRequestError

STATE_BYTES = 512
"""Maximum bytes of one state of the automaton; there is at most one for each character."""


class StopStrings:
    """Aho-Corasick automaton over the stop strings of one request, shared by all its choices.

    A state is a prefix of stop strings; 0 is the empty prefix. States are added when a text first
    reaches them, so that building costs nothing in advance: a character adds at most as many states
    as there are stop strings. Not thread-safe.

    Source: Aho and Corasick, "Efficient string matching" (1975).

    Attributes:
        lengths: length of each state's prefix.
        ends: the longest stop string that each state's prefix ends with, or None.
        start: finds the next place of a text where a stop string may begin.
    """

    __slots__ = ("_fallbacks", "_misses", "_next", "_prefixed", "ends", "lengths", "start")

    def __init__(self, stops: Iterable[str]) -> None:
        """Take the stop strings, at least one.

        Raises:
            InvalidRequestError: a stop string is empty.
        """
        unique = list(dict.fromkeys(stops))
        if not all(unique):
            raise InvalidRequestError("a stop string must not be empty", param="stop")
        self.lengths: list[int] = []
        self.ends: list[str | None] = []
        self._prefixed: list[str] = []
        # For each state, by character: the next state, or the stop strings that continue this way
        # while no text has reached it.
        self._next: list[dict[str, int | list[str]]] = []
        # For each state, the state of the longest other prefix that its prefix ends with.
        self._fallbacks: list[int] = []
        # For each state, the first fallback that has a continuation which the state lacks.
        self._misses: list[int] = []
        self._add(unique, 0, 0)
        self.start = re.compile("|".join(map(_beginning, self._next[0].values()))).search

    @staticmethod
    def size(stops: Iterable[str]) -> int:
        """Return the maximum bytes of the automaton of `stops`."""
        return STATE_BYTES * sum(map(len, stops))

    def __len__(self) -> int:
        """Return the number of states so far."""
        return len(self.lengths)

    def prefix(self, state: int) -> str:
        return self._prefixed[state][: self.lengths[state]]

    def step(self, state: int, character: str) -> int:
        """Return the state of the longest prefix at the end of `state`'s prefix + `character`."""
        while True:
            following = self._next[state].get(character)
            if isinstance(following, int):
                return following
            if following is not None:
                # At most one new state for each stop string: of one string, shorter prefixes come
                # first.
                fallback = self.step(self._fallbacks[state], character) if state else 0
                added = self._add(following, self.lengths[state] + 1, fallback)
                self._next[state][character] = added
                return added
            if not state:
                return 0
            state = self._misses[state]

    def _add(self, stops: list[str], length: int, fallback: int) -> int:
        """Add the state of the prefix of `length` characters that all of `stops` share."""
        following: dict[str, int | list[str]] = {}
        end = self.ends[fallback] if length else None
        for stop in stops:
            if len(stop) == length:
                end = stop
                continue
            sharing = following.setdefault(stop[length], [])
            assert isinstance(sharing, list)
            sharing.append(stop)
        miss = fallback
        while miss and self._next[miss].keys() <= following.keys():
            miss = self._misses[miss]
        self.lengths.append(length)
        self.ends.append(end)
        self._prefixed.append(stops[0] if stops else "")
        self._next.append(following)
        self._fallbacks.append(fallback)
        self._misses.append(miss)
        return len(self.lengths) - 1


class StopMatcher:
    """Finder of the first complete stop string in one choice's text, however it is cut.

    Of several that end at the same character the longest wins, so the shown text holds no part of
    any. Only text that may still become a stop string is held back: the prefix of the automaton's
    state, which is all that is stored.

    Attributes:
        matched: the stop string that was found, or None.
    """

    __slots__ = ("_include", "_state", "_stops", "matched")

    def __init__(self, stops: StopStrings, *, include: bool = False) -> None:
        """Start before the text.

        Args:
            stops: of the request.
            include: True to show the stop string too.
        """
        self._stops = stops
        self._include = include
        self._state = 0
        self.matched: str | None = None

    def push(self, text: str) -> tuple[str, str | None]:
        """Take more text; after a match it is dropped.

        Returns:
            The text that may be shown now, and the stop string that ended the text, or None.
        """
        if self.matched is not None:
            return "", self.matched
        stops, state = self._stops, self._state
        if not state and stops.start(text) is None:
            return text, None
        held = stops.prefix(state)
        position, end = 0, len(text)
        while position < end:
            if not state:
                start = stops.start(text, position)
                if start is None:
                    break
                position = start.start()
            state = stops.step(state, text[position])
            position += 1
            stop = stops.ends[state]
            if stop is not None:
                self.matched = stop
                whole = held + text[:position]
                return (whole if self._include else whole[: len(whole) - len(stop)]), stop
        self._state = state
        whole = held + text
        return whole[: len(whole) - stops.lengths[state]], None

    def flush(self) -> str:
        """Return the text that was held back, at the end; empty after a match."""
        held = "" if self.matched is not None else self._stops.prefix(self._state)
        self._state = 0
        return held


def _beginning(stops: "int | list[str]") -> str:
    """Pattern of the first character of `stops`, all of one, and of the second if all have one."""
    assert isinstance(stops, list)
    first, seconds = re.escape(stops[0][0]), {stop[1:2] for stop in stops}
    if "" in seconds:
        return first
    return f"{first}(?:[{''.join(map(re.escape, sorted(seconds)))}]|\\Z)"
