"""Base of the parsers: text that arrives in pieces, read by generators as if it were complete.

A generator that needs more text yields None and continues when there is more; everything else it
yields is a delta. So a parser is written as for complete texts, and the result does not depend on
how the text is cut.
"""

import json
import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from typing import TypeAlias, TypeVar

from inlay.render.output import OutputDelta

T = TypeVar("T")

Steps: TypeAlias = Generator[OutputDelta | None, None, T]
"""Generator of deltas, and of None where more text is needed."""

Show: TypeAlias = Callable[[str], OutputDelta]
"""Makes a delta from a piece of text."""

_SPACE = re.compile(r"\s*")
_WORD = re.compile(r"[\w.\-]*")
_LITERAL = re.compile(r"[\w.+\-]*")
_MARK = re.compile(r'["{}\[\]]')
_MARK_IN_STRING = re.compile(r'["\\]')

MAX_HELD = 4096
"""Maximum characters of whitespace that are held back."""


class Malformed(Exception):
    """Text that began as a tool call is none."""


def trailing_space(text: str) -> int:
    """Return the length of the whitespace at the end of `text`."""
    return len(text) - len(text.rstrip())


def trailing_newlines(text: str) -> int:
    """Return the length of the line breaks at the end of `text`."""
    return len(text) - len(text.rstrip("\r\n"))


def trailing_newline(text: str) -> int:
    """Return the length of the one line break that may end `text`."""
    return int(text.endswith("\n"))


def _nothing(text: str) -> int:
    return 0


class TextSource:
    """Text that arrives in pieces.

    Taken text is unsettled until something is shown for it, so that a parser that finds no call
    can still show all of it as content.

    Attributes:
        ended: True if no more text will come.
    """

    __slots__ = ("_at", "_text", "_unsettled", "ended")

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._unsettled: list[str] = []
        self.ended = False

    def add(self, text: str) -> None:
        """Append text."""
        self._text = self._text[self._at :] + text
        self._at = 0

    @property
    def rest(self) -> str:
        """The text that is not taken yet."""
        return self._text[self._at :]

    def take(self, count: int) -> str:
        """Take the next `count` characters, which must be there."""
        piece = self._text[self._at : self._at + count]
        self._at += count
        if piece:
            self._unsettled.append(piece)
        return piece

    def settle(self) -> str:
        """Return the text taken since the last call, and mark it as settled."""
        text = "".join(self._unsettled)
        self._unsettled.clear()
        return text

    def peek(self) -> Steps[str]:
        """Return the next character without taking it; "" at the end."""
        while self._at == len(self._text) and not self.ended:
            yield None
        return self._text[self._at : self._at + 1]

    def accept(self, literal: str) -> Steps[bool]:
        """Take `literal` if the text continues with it; return True if so."""
        while True:
            there = self._text[self._at : self._at + len(literal)]
            if there == literal:
                self.take(len(literal))
                return True
            if self.ended or not literal.startswith(there):
                return False
            yield None

    def expect(self, literal: str) -> Steps[None]:
        """Take `literal`. Raises `Malformed` if the text continues with anything else."""
        if not (yield from self.accept(literal)):
            raise Malformed

    def space(self) -> Steps[str]:
        """Take and return whitespace, if any."""
        return (yield from self._run(_SPACE))

    def newlines(self) -> Steps[None]:
        """Take line breaks, if any."""
        while (yield from self.peek()) in ("\n", "\r"):
            self.take(1)

    def word(self) -> Steps[str]:
        """Take a name: letters, digits, `_`, `.` and `-`.

        Raises `Malformed` if there is none, or if the text ends after it.
        """
        word = yield from self._run(_WORD)
        if not word or not (yield from self.peek()):
            raise Malformed
        return word

    def _run(self, pattern: re.Pattern[str]) -> Steps[str]:
        """Take all that matches `pattern`, which must match any part of a longer match."""
        taken = ""
        while True:
            match = pattern.match(self._text, self._at)
            taken += self.take(len(match[0])) if match else ""
            if self._at < len(self._text) or self.ended:
                return taken
            yield None

    def until(
        self, tags: Sequence[str], show: Show | None, *, hold: Callable[[str], int] = _nothing
    ) -> Steps[str | None]:
        """Show the text before the first of `tags`.

        Args:
            tags: none may be the beginning of another.
            show: makes deltas of the text; None leaves it unsettled.
            hold: returns the length at a text's end that is not shown before a tag or the end.

        Returns:
            The tag. It is taken with the text held back before it, and neither is settled. None if
            the text ended; then the text held back is not taken.
        """
        while True:
            rest = self.rest
            place, tag = min(
                ((place, tag) for tag in tags if (place := rest.find(tag)) >= 0),
                default=(len(rest), None),
            )
            before = rest[:place]
            if tag is None and not self.ended:
                before = before[: len(before) - _partial(before, tags)]
            before = before[: len(before) - min(hold(before), MAX_HELD)]
            if before:
                self.take(len(before))
                if show is not None:
                    yield show(self.settle())
            if tag is not None:
                self.take(place - len(before) + len(tag))
                return tag
            if self.ended:
                return None
            yield None

    def collect(self, *tags: str) -> Steps[tuple[str, str | None]]:
        """Take the text before the first of `tags`, and the tag.

        Returns:
            Text and tag, neither of them settled. The tag is None if the text ended.
        """
        before = len(self._unsettled)
        tag = yield from self.until(tags, None)
        return "".join(self._unsettled[before:]).removesuffix(tag or ""), tag

    def nested(self, show: Show | None, *, begun: str = "") -> Steps[bool]:
        """Take a JSON object, list or string, up to its closing character, without parsing it.

        Args:
            show: makes deltas of it as it arrives; None leaves it unsettled.
            begun: its beginning that was taken before.

        Returns:
            True if it was closed before the text ended.
        """
        nesting = _Nesting()
        nesting.end(begun, 0)
        while True:
            end = nesting.end(self._text, self._at)
            self.take(end - self._at)
            if show is not None and self._unsettled:
                yield show(self.settle())
            if nesting.closed or self.ended:
                return nesting.closed
            yield None

    def string(self) -> Steps[str]:
        """Take a JSON string and return its value. Raises `Malformed` if there is none."""
        before = len(self._unsettled)
        if (yield from self.peek()) != '"' or not (yield from self.nested(None)):
            raise Malformed
        try:
            value: str = json.loads("".join(self._unsettled[before:]), strict=False)
        except ValueError as error:
            raise Malformed from error
        return value

    def value(self) -> Steps[str]:
        """Take any JSON value and return its text. Raises `Malformed` if there is none."""
        start = yield from self.peek()
        before = len(self._unsettled)
        if start and start in '{["':
            if not (yield from self.nested(None)):
                raise Malformed
        elif not (yield from self._run(_LITERAL)):
            raise Malformed
        return "".join(self._unsettled[before:])


class _Nesting:
    """Finder of the end of a JSON object, list or string in a text that arrives in pieces.

    Attributes:
        closed: True if it has ended.
    """

    __slots__ = ("_depth", "_escaped", "_quoted", "closed")

    def __init__(self) -> None:
        self._depth = 0
        self._quoted = False
        self._escaped = False
        self.closed = False

    def end(self, text: str, at: int) -> int:
        """Return the position after the value's last character, or the end of `text`."""
        while at < len(text):
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            match = (_MARK_IN_STRING if self._quoted else _MARK).search(text, at)
            if match is None:
                break
            at = match.end()
            mark = match[0]
            if mark == "\\":
                self._escaped = True
                continue
            if mark == '"':
                self._quoted = not self._quoted
            else:
                self._depth += 1 if mark in "{[" else -1
            if not self._quoted and self._depth <= 0:
                self.closed = True
                return at
        return len(text)


def _partial(text: str, tags: Sequence[str]) -> int:
    """Return the length of the longest end of `text` that may become one of `tags`."""
    longest = max(map(len, tags), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
        if any(tag.startswith(text[-length:]) for tag in tags):
            return length
    return 0


class StepsParser(ABC):
    """`OutputParser` whose subclasses read `source` in `_read`."""

    def __init__(self) -> None:
        self.source = TextSource()
        self._steps = self._read()

    @abstractmethod
    def _read(self) -> Steps[None]:
        """Read the whole output as it arrives."""

    def push(self, text: str) -> list[OutputDelta]:
        self.source.add(text)
        return self._run()

    def flush(self) -> list[OutputDelta]:
        self.source.ended = True
        return self._run()

    def _run(self) -> list[OutputDelta]:
        deltas: list[OutputDelta] = []
        for delta in self._steps:
            if delta is None:
                break
            deltas.append(delta)
        return deltas
