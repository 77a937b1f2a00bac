"""Output items of a response while they grow, with their events."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol, TypeVar

from blake3 import blake3

from inlay.api.openai.schema.chat import TokenLogprob
from inlay.api.openai.schema.responses import (
    ItemStatus,
    OutputFunctionCall,
    OutputItem,
    OutputMessage,
    OutputReasoning,
    OutputText,
    ReasoningText,
)
from inlay.api.openai.schema.responses_events import (
    ArgumentsDelta,
    ArgumentsDone,
    ItemAdded,
    ItemDone,
    PartAdded,
    PartDone,
    ReasoningDelta,
    ReasoningDone,
    ResponseEvent,
    TextDelta,
    TextDone,
)
from inlay.render import ContentDelta, OutputDelta, ToolCallDelta

E = TypeVar("E", bound=ResponseEvent)


@dataclass(frozen=True, slots=True)
class _Place:
    """Identity of an item.

    Attributes:
        output_index: index in the response.
        item_id: id of the item.
        number: returns the number of the stream's next event.
    """

    output_index: int
    item_id: str
    number: Callable[[], int]

    def event(self, kind: Callable[..., E], **fields: Any) -> E:
        """Return an event within the item."""
        return kind(
            sequence_number=self.number(),
            item_id=self.item_id,
            output_index=self.output_index,
            **fields,
        )

    def of_part(self, kind: Callable[..., E], **fields: Any) -> E:
        """Return an event of the item's only part."""
        return self.event(kind, content_index=0, **fields)

    def of_item(self, kind: Callable[..., E], item: OutputItem) -> E:
        """Return an event with the item."""
        return kind(sequence_number=self.number(), output_index=self.output_index, item=item)


class _Growing(Protocol):
    """Item that is not complete yet."""

    def begin(self) -> list[ResponseEvent]:
        """Return the events of its start."""

    def grow(self, delta: OutputDelta, logprobs: list[TokenLogprob]) -> list[ResponseEvent] | None:
        """Add a delta; return its events, or None if it belongs to another item."""

    def end(self, status: ItemStatus) -> list[ResponseEvent]: ...

    def item(self, status: ItemStatus) -> OutputItem:
        """Return the item as it is now."""


class _Message:
    def __init__(self, place: _Place) -> None:
        self._place = place
        self._text: list[str] = []
        self._logprobs: list[TokenLogprob] = []

    def begin(self) -> list[ResponseEvent]:
        message = OutputMessage(self._place.item_id, "in_progress", [])
        part = OutputText("")
        return [self._place.of_item(ItemAdded, message), self._place.of_part(PartAdded, part=part)]

    def grow(self, delta: OutputDelta, logprobs: list[TokenLogprob]) -> list[ResponseEvent] | None:
        if not isinstance(delta, ContentDelta):
            return None
        self._text.append(delta.text)
        self._logprobs += logprobs
        return [self._place.of_part(TextDelta, delta=delta.text, logprobs=logprobs)]

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        part, place = self._part(), self._place
        return [
            place.of_part(TextDone, text=part.text, logprobs=part.logprobs),
            place.of_part(PartDone, part=part),
            place.of_item(ItemDone, self.item(status)),
        ]

    def item(self, status: ItemStatus) -> OutputMessage:
        return OutputMessage(self._place.item_id, status, [self._part()])

    def _part(self) -> OutputText:
        return OutputText("".join(self._text), logprobs=self._logprobs)


class _Reasoning:
    def __init__(self, place: _Place) -> None:
        self._place = place
        self._text: list[str] = []

    def begin(self) -> list[ResponseEvent]:
        reasoning = OutputReasoning(self._place.item_id, "in_progress", [])
        return [
            self._place.of_item(ItemAdded, reasoning),
            self._place.of_part(PartAdded, part=ReasoningText("")),
        ]

    def grow(self, delta: OutputDelta, logprobs: list[TokenLogprob]) -> list[ResponseEvent] | None:
        if isinstance(delta, ContentDelta | ToolCallDelta):
            return None
        self._text.append(delta.text)
        return [self._place.of_part(ReasoningDelta, delta=delta.text)]

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        part, place = ReasoningText("".join(self._text)), self._place
        return [
            place.of_part(ReasoningDone, text=part.text),
            place.of_part(PartDone, part=part),
            place.of_item(ItemDone, self.item(status)),
        ]

    def item(self, status: ItemStatus) -> OutputReasoning:
        return OutputReasoning(self._place.item_id, status, [ReasoningText("".join(self._text))])


class _Call:
    def __init__(self, place: _Place, first: ToolCallDelta) -> None:
        self._place = place
        self._index = first.index
        self._call_id = first.id or ""
        self._name = first.name or ""
        self._arguments: list[str] = []

    def begin(self) -> list[ResponseEvent]:
        return [self._place.of_item(ItemAdded, self.item("in_progress"))]

    def grow(self, delta: OutputDelta, logprobs: list[TokenLogprob]) -> list[ResponseEvent] | None:
        if not isinstance(delta, ToolCallDelta) or delta.index != self._index:
            return None
        if not delta.arguments:
            return []
        self._arguments.append(delta.arguments)
        return [self._place.event(ArgumentsDelta, delta=delta.arguments)]

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        item, place = self.item(status), self._place
        return [
            place.event(ArgumentsDone, name=item.name, arguments=item.arguments),
            place.of_item(ItemDone, item),
        ]

    def item(self, status: ItemStatus) -> OutputFunctionCall:
        return OutputFunctionCall(
            self._place.item_id, status, self._call_id, self._name, "".join(self._arguments)
        )


def item_id(prefix: str, response_id: str, index: int) -> str:
    """Return the id of an item of a response, a function of these."""
    return f"{prefix}_{blake3(f'{response_id}/{prefix}/{index}'.encode()).hexdigest(16)}"


class Items:
    """Output items of one response.

    One item is open at a time: it ends when a delta belongs to another one.

    Args:
        number: returns the number of the stream's next event.
        response_id: ids of items are made of it, so that a response that is made again has the
            same.
    """

    def __init__(self, number: Callable[[], int], response_id: str) -> None:
        self._number = number
        self._response_id = response_id
        self._done: list[OutputItem] = []
        self._open: _Growing | None = None

    def take(
        self, deltas: Sequence[OutputDelta], logprobs: list[TokenLogprob]
    ) -> list[ResponseEvent]:
        """Take deltas and return their events.

        Args:
            deltas: of the output, in order.
            logprobs: of the answer's tokens; they go with its first text.
        """
        events: list[ResponseEvent] = []
        for delta in deltas:
            shown = logprobs if isinstance(delta, ContentDelta) else []
            grown = None if self._open is None else self._open.grow(delta, shown)
            if grown is None:
                events += self.end("completed")
                self._open = self._item_of(delta)
                events += self._open.begin()
                grown = self._open.grow(delta, shown) or []
            events += grown
            if isinstance(delta, ContentDelta):
                logprobs = []
        return events

    def _item_of(self, delta: OutputDelta) -> _Growing:
        if isinstance(delta, ToolCallDelta):
            return _Call(self._place("fc"), delta)
        return (
            _Message(self._place("msg"))
            if isinstance(delta, ContentDelta)
            else _Reasoning(self._place("rs"))
        )

    def _place(self, prefix: str) -> _Place:
        return _Place(
            len(self._done), item_id(prefix, self._response_id, len(self._done)), self._number
        )

    def end(self, status: ItemStatus) -> list[ResponseEvent]:
        """End the open item."""
        if self._open is None:
            return []
        events = self._open.end(status)
        self._done.append(self._open.item(status))
        self._open = None
        return events

    def finish(self, status: ItemStatus) -> list[ResponseEvent]:
        """End the output. An empty output is an empty message."""
        events: list[ResponseEvent] = []
        if self._open is None and not self._done:
            self._open = _Message(self._place("msg"))
            events += self._open.begin()
        return events + self.end(status)

    def so_far(self) -> list[OutputItem]:
        """Return the items, with the open one as it is."""
        return [*self._done, *([] if self._open is None else [self._open.item("incomplete")])]
