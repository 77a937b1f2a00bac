"""What a model's output says: content, reasoning and tool calls, told apart as the text comes.

    parser = format.parser()                 one for each choice
    parser.push(text) -> [deltas]            what `text` settles
    parser.flush() -> [deltas]               what is left when no more text will come
    Output.of(deltas)                        all of them put together

Every API shape builds on these types; which parser a model needs is for the others of this package
to say.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Protocol, TypeAlias


@dataclass(frozen=True, slots=True)
class ContentDelta:
    """A piece of the answer itself."""

    text: str


@dataclass(frozen=True, slots=True)
class ReasoningDelta:
    """A piece of what the model thought before it answered."""

    text: str


@dataclass(frozen=True, slots=True)
class ToolCallDelta:
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


OutputDelta: TypeAlias = ContentDelta | ReasoningDelta | ToolCallDelta


class OutputParser(Protocol):
    """Reads the output of one choice.

    What `push` and `flush` return says the same however the text was cut. No text is lost and
    nothing raises: what looks like a tool call and is none is content.
    """

    def push(self, text: str) -> list[OutputDelta]:
        """What `text` settles; none of the deltas is empty, but for the first of a tool call."""
        ...

    def flush(self) -> list[OutputDelta]:
        """What is left when no more text will come."""
        ...


class ContentParser:
    """All text is content."""

    __slots__ = ()

    def push(self, text: str) -> list[OutputDelta]:
        """As `OutputParser.push`."""
        return [ContentDelta(text)] if text else []

    def flush(self) -> list[OutputDelta]:
        """As `OutputParser.flush`."""
        return []


class Begins(Enum):
    """Where an output begins."""

    INSIDE = "inside"
    """In the reasoning, whether or not its tag is written once more."""
    OPEN = "open"
    """Before everything: the first word may be the tag."""
    BEHIND = "behind"
    """Behind the reasoning, or without any."""


@dataclass(frozen=True, slots=True)
class ReasoningIds:
    """Where reasoning stands, in token ids.

    Between the tokens `start` and `end`, in an output that begins as `begins` says.
    """

    start: int
    end: int
    begins: Begins


@dataclass(frozen=True, slots=True)
class OutputFormat:
    """How the output of a request is read.

    Attributes:
        parser: makes the parser of one choice.
        special_tokens: those the parser must see; it is shown them even where special tokens are
            skipped.
        reasoning: by which the tokens of the reasoning are counted; None where they cannot be.
    """

    parser: Callable[[], OutputParser] = ContentParser
    special_tokens: frozenset[str] = frozenset()
    reasoning: ReasoningIds | None = None


PLAIN = OutputFormat()
"""All text is content."""


@dataclass(slots=True)
class ParsedOutput:
    """What deltas say together.

    Attributes:
        content: the answer.
        reasoning: what was thought before it.
        tool_calls: by index; a call whose first delta is not among the deltas has no id and no
            name.
    """

    content: str = ""
    reasoning: str = ""
    tool_calls: list[ToolCallDelta] = field(default_factory=list)

    @classmethod
    def of(cls, deltas: Iterable[OutputDelta]) -> "ParsedOutput":
        """Put `outputs` together."""
        content: list[str] = []
        reasoning: list[str] = []
        calls: dict[int, list[ToolCallDelta]] = {}
        for delta in deltas:
            if isinstance(delta, ContentDelta):
                content.append(delta.text)
            elif isinstance(delta, ReasoningDelta):
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


__all__ = [
    "PLAIN",
    "Begins",
    "ContentDelta",
    "ContentParser",
    "OutputDelta",
    "OutputFormat",
    "OutputParser",
    "ParsedOutput",
    "ReasoningDelta",
    "ReasoningIds",
    "ToolCallDelta",
]
