"""Events of a stream of `/v1/responses`, numbered from 0."""

from typing import Annotated, TypeAlias

import msgspec

from inlay.api.openai.schema.chat import TokenLogprob
from inlay.api.openai.schema.responses import OutputItem, OutputText, ReasoningText, Response
from inlay.api.schema.described import ToolArguments, ToolName
from inlay.base.errors import ErrorBody
from inlay.messages.fields import field


class ResponseEvent(msgspec.Struct, frozen=True, kw_only=True, tag_field="type"):
    """Fields of every event. Its type is also its name as a server-sent event."""

    sequence_number: Annotated[int, field("number of the event, from 0.", 4)]


class Created(ResponseEvent, frozen=True, kw_only=True, tag="response.created"):
    """First event, before any output."""

    response: Annotated[Response, field("the response as far as it is.")]


class InProgress(ResponseEvent, frozen=True, kw_only=True, tag="response.in_progress"):
    """Start of the generation."""

    response: Annotated[Response, field("the response as far as it is.")]


class Completed(ResponseEvent, frozen=True, kw_only=True, tag="response.completed"):
    """The whole response, which ended normally."""

    response: Annotated[Response, field("the response as far as it is.")]


class Incomplete(ResponseEvent, frozen=True, kw_only=True, tag="response.incomplete"):
    """The whole response, cut at its token limit."""

    response: Annotated[Response, field("the response as far as it is.")]


class Failed(ResponseEvent, frozen=True, kw_only=True, tag="response.failed"):
    """The output so far of a response that failed."""

    response: Annotated[Response, field("the response as far as it is.")]


class ItemAdded(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.added"):
    """Start of an item."""

    output_index: Annotated[int, field("place of the item in `output`, from 0.", 0)]
    item: Annotated[OutputItem, field("the item.")]


class ItemDone(ResponseEvent, frozen=True, kw_only=True, tag="response.output_item.done"):
    """End of an item."""

    output_index: Annotated[int, field("place of the item in `output`, from 0.", 0)]
    item: Annotated[OutputItem, field("the item.")]


class _Within(ResponseEvent, frozen=True, kw_only=True):
    """Fields of events within an item."""

    item_id: Annotated[str, field("id of the item.", "msg_5d0f")]
    output_index: Annotated[int, field("place of the item in `output`, from 0.", 0)]


class _WithinPart(_Within, frozen=True, kw_only=True):
    """Fields of events within a part of an item's content."""

    content_index: Annotated[int, field("place of the part in the item's `content`, from 0.", 0)]


class PartAdded(_WithinPart, frozen=True, kw_only=True, tag="response.content_part.added"):
    """Start of a part."""

    part: Annotated[OutputText | ReasoningText, field("the part.")]


class PartDone(_WithinPart, frozen=True, kw_only=True, tag="response.content_part.done"):
    """End of a part."""

    part: Annotated[OutputText | ReasoningText, field("the part.")]


class TextDelta(_WithinPart, frozen=True, kw_only=True, tag="response.output_text.delta"):
    """More text, with the logprobs of its tokens."""

    delta: Annotated[str, field("what is new of the text.", " Paris")]
    logprobs: Annotated[
        list[TokenLogprob], field("logprobs of the tokens; null unless asked for.")
    ] = []


class TextDone(_WithinPart, frozen=True, kw_only=True, tag="response.output_text.done"):
    """The complete text."""

    text: Annotated[str, field("the whole text.", "Paris.")]
    logprobs: Annotated[
        list[TokenLogprob], field("logprobs of the tokens; null unless asked for.")
    ] = []


class ReasoningDelta(_WithinPart, frozen=True, kw_only=True, tag="response.reasoning_text.delta"):
    """More reasoning."""

    delta: Annotated[str, field("what is new of the reasoning.", "France, so")]


class ReasoningDone(_WithinPart, frozen=True, kw_only=True, tag="response.reasoning_text.done"):
    """The complete reasoning."""

    text: Annotated[str, field("the whole reasoning.", "France, so Paris.")]


class ArgumentsDelta(
    _Within, frozen=True, kw_only=True, tag="response.function_call_arguments.delta"
):
    """More arguments of a call."""

    delta: Annotated[str, field("what is new of the arguments.", '{"city')]


class ArgumentsDone(
    _Within, frozen=True, kw_only=True, tag="response.function_call_arguments.done"
):
    """The complete arguments of a call."""

    name: ToolName
    arguments: ToolArguments


class ErrorEvent(ResponseEvent, frozen=True, kw_only=True, tag="error"):
    """Error of a response, in the form of OpenAI's event and, under `error`, as on other routes."""

    error: Annotated[ErrorBody, field("the error.")]
    code: Annotated[
        str | None,
        field("kind of the error in more detail; may be null.", "context_length_exceeded"),
    ]
    message: Annotated[str, field("what is wrong.", "the worker was lost")]
    param: Annotated[
        str | None, field("place in the request, as `messages[0].content`.", "max_tokens")
    ]


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
