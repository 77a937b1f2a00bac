"""The events of a stream of `/v1/responses`. Each is numbered, from 0."""

from typing import TypeAlias

import msgspec

from inlay.api.openai.chat import TokenLogprob
from inlay.api.openai.responses import OutputItem, OutputText, ReasoningText, Response
from inlay.errors import ErrorBody


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Any event."""

    sequence_number: int

    @property
    def name(self) -> str:
        """Its type, which is also its name as a server-sent event."""
        return str(self.__struct_config__.tag)


class Created(ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    """The first event; nothing is generated yet."""

    response: Response


class InProgress(ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """Generation has begun."""

    response: Response


class Completed(ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    """The whole response, which ended by itself."""

    response: Response


class Incomplete(ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    """The whole response, which ran into its limit."""

    response: Response


class Failed(ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    """What there is of a response that failed."""

    response: Response


class ItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """An item begins."""

    output_index: int
    item: OutputItem


class ItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """An item is whole."""

    output_index: int
    item: OutputItem


class _Within(ResponseEvent, frozen=True, kw_only=True):
    """Something within an item."""

    item_id: str
    output_index: int


class _WithinPart(_Within, frozen=True, kw_only=True):
    """Something within a part of an item's content."""

    content_index: int


class PartAdded(_WithinPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """A part begins."""

    part: OutputText | ReasoningText


class PartDone(_WithinPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """A part is whole."""

    part: OutputText | ReasoningText


class TextDelta(_WithinPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text, and the logprobs of the tokens that have come with it."""

    delta: str
    logprobs: list[TokenLogprob] = []


class TextDone(_WithinPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """All text."""

    text: str
    logprobs: list[TokenLogprob] = []


class ReasoningDelta(_WithinPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: str


class ReasoningDone(_WithinPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """All reasoning."""

    text: str


class ArgumentsDelta(
    _Within, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More of a call's arguments."""

    delta: str


class ArgumentsDone(
    _Within, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """All of a call's arguments."""

    name: str
    arguments: str


class ErrorEvent(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """Why the response failed, as OpenAI's error event says it and, under `error`, as every error says it."""

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
"""Every event there is."""
