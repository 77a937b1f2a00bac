"""Events of a stream of `/v1/responses`, numbered from 0."""

from typing import TypeAlias

import msgspec

from inlay.api.openai.schema.chat import TokenLogprob
from inlay.api.openai.schema.responses import OutputItem, OutputText, ReasoningText, Response
from inlay.base.errors import ErrorBody


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Fields of every event. Its type is also its name as a server-sent event."""

    sequence_number: int


class Created(ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    """First event, before any output."""

    response: Response


class InProgress(ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """Start of the generation."""

    response: Response


class Completed(ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    """The whole response, which ended normally."""

    response: Response


class Incomplete(ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    """The whole response, cut at its token limit."""

    response: Response


class Failed(ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    """The output so far of a response that failed."""

    response: Response


class ItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """Start of an item."""

    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """End of an item."""

    output_index: int
    item: OutputItem


class _Within(ResponseEvent, frozen=True, kw_only=True):
    """Fields of events within an item."""

    item_id: str
    output_index: int


class _WithinPart(_Within, frozen=True, kw_only=True):
    """Fields of events within a part of an item's content."""

    content_index: int


class PartAdded(_WithinPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """Start of a part."""

    part: OutputText | ReasoningText


class PartDone(_WithinPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """End of a part."""

    part: OutputText | ReasoningText


class TextDelta(_WithinPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text, with the logprobs of its tokens."""

    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(_WithinPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The complete text."""

    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(_WithinPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(_WithinPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The complete reasoning."""

    text: str


class ArgumentsDelta(
    _Within, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More arguments of a call."""

    delta: str


class ArgumentsDone(
    _Within, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """The complete arguments of a call."""

    name: str
    arguments: str


class ErrorEvent(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """Error of a response, in the form of OpenAI's event and, under `error`, as on other routes."""

    error: ErrorBody
    code: str | None
    message: str
    param: str | None


StreamEvent: TypeAlias = (
    Created
    | InProgress
    | Completed
    | Incomplete
    | Failed
    | ItemAdded
    | ItemDone
    | PartAdded
    | PartDone
    | TextDelta
    | TextDone
    | ReasoningDelta
    | ReasoningDone
    | ArgumentsDelta
    | ArgumentsDone
    | ErrorEvent
)
"""All events."""
