"""Parsed output of a model: content, reasoning and tool calls, separated as the text arrives.

    parser = format.parser()                 one for each choice
    parser.push(text) -> [deltas]            deltas of further text
    parser.flush() -> [deltas]               the rest at the end
    ParsedOutput.of(deltas)                  all deltas joined

Every API shape builds on these types; `formats` chooses the parser of a model.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias

import msgspec


class ContentDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of the answer itself."""

    text: str


class ReasoningPiece(msgspec.Struct, frozen=True, gc=False):
    """A piece of the reasoning before the answer."""

    text: str


class ToolCallDelta(msgspec.Struct, frozen=True, gc=False):
    """A piece of a tool call.

    Attributes:
        index: of the call in the output, from 0 without gaps; calls come one after the other.
        id: of the call; only the first delta of a call has it.
        name: of the function, whole; only the first delta of a call has it.
        arguments: a piece of the arguments, which are JSON text as the model wrote it.
    """

    index: int
    id: str | None
    name: str | None
    arguments: str


OutputDelta: TypeAlias = ContentDelta | ReasoningPiece | ToolCallDelta


class OutputParser(Protocol):
    """Parser of one choice's output.

    The joined deltas do not depend on how the text is cut. No text is lost and nothing raises: text
    that looks like a tool call but is none is content.
    """

    def push(self, text: str) -> list[OutputDelta]:
        """Take text and return its deltas; only the first delta of a tool call may be empty."""

    def flush(self) -> list[OutputDelta]:
        """Return the deltas that were held back, at the end of the text."""


class ContentParser:
    """Parser for which all text is content."""

    __slots__ = ()

    def push(self, text: str) -> list[OutputDelta]:
        return [ContentDelta(text)] if text else []

    def flush(self) -> list[OutputDelta]:
        return []


class Begins(Enum):
    """Position of an output's start relative to the reasoning."""

    INSIDE = "inside"
    """Inside the reasoning; the start tag may be repeated."""
    OPEN = "open"
    """Before everything: the first word may be the start tag."""
    BEHIND = "behind"
    """After the reasoning, or without any."""


@dataclass(frozen=True, slots=True)
class ReasoningIds:
    """Token ids of the reasoning's tags, and the position of the output's start."""

    start: int
    end: int
    begins: Begins


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """Output format of a request.

    Attributes:
        parser: makes the parser of one choice.
        special_tokens: special tokens that the parser must see, even if special tokens are skipped.
        reasoning: ids for counting reasoning tokens; None if they cannot be counted.
    """

    parser: Callable[[], OutputParser] = ContentParser
    special_tokens: frozenset[str] = frozenset()
    reasoning: ReasoningIds | None = None


PLAIN = OutputFormat()
"""Format for which all text is content."""


@dataclass(slots=True)
class ParsedOutput:
    """Joined deltas of an output.

    Attributes:
        content: the answer.
        reasoning: the reasoning before it.
        tool_calls: by index; a call without its first delta has no id and no name.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[OutputDelta]) -> "ParsedOutput":
        """Join deltas."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, list[ToolCallDelta]] = {}
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                content.append(delta.text)
            elif isinstance(delta, ReasoningPiece):
                reasoning.append(delta.text)
            else:
                calls.setdefault(delta.index, []).append(delta)
        tool_calls = [
            ToolCallDelta(
                index, pieces[0].id, pieces[0].name, "".join(piece.arguments for piece in pieces)
            )
            for index, pieces in calls.items()
        ]
        return cls("".join(content), "".join(reasoning), tool_calls)
