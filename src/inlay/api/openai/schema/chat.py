"""Responses of `/v1/chat/completions`."""

from typing import Literal

import msgspec

from inlay.api.openai.schema.generation import UsageInfo, WholeResponse
from inlay.api.schema.generation import PromptLogprob


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative token at a position."""

    token: str
    logprob: float
    bytes: list[int]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token chosen at a position, and the most likely ones."""

    token: str
    logprob: float
    bytes: list[int]
    top_logprobs: list[TopLogprob]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a message's content."""

    content: list[TokenLogprob]


class FunctionCall(msgspec.Struct, frozen=True):
    """A function's name, and its arguments as the model wrote them, which is JSON text."""

    name: str
    arguments: str


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool."""

    id: str
    function: FunctionCall
    type: Literal["function"] = "function"


class ImageUrl(msgspec.Struct, frozen=True):
    """An image as a data: URL in base64."""

    url: str


class TextOutputPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """The text of an answer that has images too."""

    text: str


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """An image of an answer."""

    image_url: ImageUrl


class ChatAudioData(msgspec.Struct, frozen=True):
    """The sound of an answer.

    Attributes:
        data: the file, in base64.
        expires_at: Unix time of the answer: no sound is kept for later requests.
    """

    id: str
    data: str
    transcript: str
    expires_at: int


class AudioDelta(msgspec.Struct, frozen=True):
    """Addition of an event to the sound of an answer, or to its transcript."""

    id: str
    transcript: str | msgspec.UnsetType = msgspec.UNSET
    data: str | msgspec.UnsetType = msgspec.UNSET
    expires_at: int | msgspec.UnsetType = msgspec.UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's answer.

    Attributes:
        content: None where there are only tool calls, or only reasoning; parts where there is an
            image.
        reasoning: the model's reasoning before the answer; `reasoning_content` is the same under
            vLLM's older name.
    """

    role: Literal["assistant"] = "assistant"
    content: str | list[TextOutputPart | ImagePart] | None
    refusal: None = None
    annotations: None = None
    audio: ChatAudioData | None = None
    function_call: None = None
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: int
    message: ChatMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    token_ids: list[int] | None = None
    routed_experts: None = None


class ChatCompletion(WholeResponse, frozen=True, kw_only=True):
    """The response of `/v1/chat/completions`."""

    id: str
    object: Literal["chat.completion"] = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: UsageInfo
    prompt_logprobs: list[dict[str, PromptLogprob] | None] | None = None
    prompt_token_ids: list[int] | None = None
    prompt_text: None = None


class FunctionCallDelta(msgspec.Struct, frozen=True):
    """A piece of a function call."""

    name: str | msgspec.UnsetType
    arguments: str


class ToolCallPiece(msgspec.Struct, frozen=True):
    """Addition of an event to the tool call `index`; id, type and name come with the first."""

    index: int
    id: str | msgspec.UnsetType
    type: Literal["function"] | msgspec.UnsetType
    function: FunctionCallDelta


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Addition of an event to a message; the role comes with the first."""

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: str | list[ImagePart] | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallPiece] | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    audio: AudioDelta | msgspec.UnsetType = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one answer.

    The first has the role and no `token_ids`; only the last has `stop_reason`.
    """

    index: int
    delta: ChatDelta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: int | str | msgspec.UnsetType | None = msgspec.UNSET
    token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a chat stream.

    The first event of a choice has the prompt's fields, the last one `system_fingerprint`. Where a
    request has `modalities`, events with a choice have the `modality` of what they bring, as
    vLLM-Omni's have, and the `stage` that made it, by the name of its workers.
    """

    id: str
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: UsageInfo | msgspec.UnsetType = msgspec.UNSET
    system_fingerprint: str | msgspec.UnsetType = msgspec.UNSET
    prompt_token_ids: list[int] | msgspec.UnsetType | None = msgspec.UNSET
    prompt_text: msgspec.UnsetType | None = msgspec.UNSET
    modality: Literal["text", "image", "audio"] | msgspec.UnsetType = msgspec.UNSET
    stage: str | msgspec.UnsetType = msgspec.UNSET
