"""Responses of `/v1/chat/completions`."""

from typing import Annotated, Literal

import msgspec

from inlay.api.openai.schema.generation import (
    ChunkMetrics,
    UsageInfo,
    WeightVersions,
    WholeResponse,
)
from inlay.api.schema.described import (
    AnswerText,
    CreatedAt,
    Fingerprint,
    FinishReason,
    ListIndex,
    Logprob,
    ModelName,
    PromptTokenIds,
    StopReason,
    TokenIds,
    TokenText,
    ToolArguments,
    ToolName,
)
from inlay.api.schema.generation import PromptLogprob
from inlay.api.schema.hidden_states import ShownStates
from inlay.messages.fields import example, field


class TopLogprob(msgspec.Struct, frozen=True):
    """One alternative token at a position."""

    token: TokenText
    logprob: Logprob
    bytes: Annotated[list[int], field("bytes of the token in UTF-8.", [32, 80, 97, 114, 105, 115])]


class TokenLogprob(msgspec.Struct, frozen=True):
    """The token chosen at a position, and the most likely ones."""

    token: TokenText
    logprob: Logprob
    bytes: Annotated[list[int], field("bytes of the token in UTF-8.", [32, 80, 97, 114, 105, 115])]
    top_logprobs: Annotated[list[TopLogprob], field("the likeliest tokens at this position.")]


class ChatLogprobs(msgspec.Struct, frozen=True):
    """Logprobs of a message's content."""

    content: Annotated[list[TokenLogprob], field("logprobs of each token.")]


class FunctionCall(msgspec.Struct, frozen=True):
    """A function's name, and its arguments as the model wrote them, which is JSON text."""

    name: ToolName
    arguments: ToolArguments


class ToolCall(msgspec.Struct, frozen=True):
    """A call of a tool."""

    id: Annotated[str, field("id that the tool's result refers to.", "call_5d0f")]
    function: Annotated[FunctionCall, field("name and arguments of the call.")]
    type: Literal["function"] = "function"


class ImageUrl(msgspec.Struct, frozen=True):
    """An image as a data: URL in base64."""

    url: Annotated[str, field("a data: URL.", "data:image/png;base64,...")]


class TextOutputPart(msgspec.Struct, frozen=True, tag_field="type", tag="text"):
    """The text of an answer that has images too."""

    text: AnswerText


class ImagePart(msgspec.Struct, frozen=True, tag_field="type", tag="image_url"):
    """An image of an answer."""

    image_url: Annotated[ImageUrl, field("the image.")]


class ChatAudioData(msgspec.Struct, frozen=True):
    """The sound of an answer.

    Attributes:
        data: the file, in base64.
        expires_at: Unix time of the answer: no sound is kept for later requests.
    """

    id: Annotated[str, field("id of the sound.", "audio-5d0f")]
    data: Annotated[str, example("UklGRg...")]
    transcript: Annotated[str, field("text that is spoken.", "Paris.")]
    expires_at: Annotated[int, example(1764000000)]


class AudioDelta(msgspec.Struct, frozen=True):
    """Addition of an event to the sound of an answer, or to its transcript."""

    id: Annotated[str, field("id of the sound.", "audio-5d0f")]
    transcript: Annotated[str | msgspec.UnsetType, field("text that is spoken.", "Paris.")] = (
        msgspec.UNSET
    )
    data: Annotated[
        str | msgspec.UnsetType, field("what is new of the file, in base64.", "UklGRg...")
    ] = msgspec.UNSET
    expires_at: Annotated[
        int | msgspec.UnsetType, field("Unix time of the answer: no sound is kept.", 1764000000)
    ] = msgspec.UNSET


class ChatMessage(msgspec.Struct, frozen=True, kw_only=True):
    """The assistant's answer.

    Attributes:
        content: None where there are only tool calls, or only reasoning; parts where there is an
            image.
        reasoning: the model's reasoning before the answer; `reasoning_content` is the same under
            vLLM's older name.
    """

    role: Literal["assistant"] = "assistant"
    content: Annotated[str | list[TextOutputPart | ImagePart] | None, example("Paris")]
    refusal: None = None
    annotations: None = None
    audio: Annotated[ChatAudioData | None, field("sound of the answer.")] = None
    function_call: None = None
    tool_calls: Annotated[list[ToolCall] | msgspec.UnsetType, field("calls of tools.")] = (
        msgspec.UNSET
    )
    reasoning: Annotated[str | None, example("France, so")] = None
    reasoning_content: Annotated[
        str | msgspec.UnsetType,
        field("the same as `reasoning`, under vLLM's older name.", "France, so"),
    ] = msgspec.UNSET


class ChatChoice(msgspec.Struct, frozen=True):
    """One answer."""

    index: ListIndex
    message: Annotated[ChatMessage, field("the whole message.")]
    logprobs: Annotated[
        ChatLogprobs | None, field("logprobs of the tokens; null unless asked for.")
    ] = None
    finish_reason: FinishReason = None
    stop_reason: StopReason = None
    token_ids: TokenIds = None
    routed_experts: None = None
    hidden_states: ShownStates = msgspec.UNSET
    weight_versions: WeightVersions = msgspec.UNSET


class ChatCompletion(WholeResponse, frozen=True, kw_only=True):
    """The response of `/v1/chat/completions`."""

    id: Annotated[str, field("id of this answer.", "chatcmpl-5d0f")]
    object: Literal["chat.completion"] = "chat.completion"
    created: CreatedAt
    model: ModelName
    choices: Annotated[list[ChatChoice], field("answers; in a stream, what is new of them.")]
    usage: Annotated[UsageInfo, field("Positions and tokens of this answer.")]
    prompt_logprobs: Annotated[
        list[dict[str, PromptLogprob] | None] | None,
        field("logprobs by token id at each position of the prompt; null unless asked for."),
    ] = None
    prompt_token_ids: PromptTokenIds = None
    prompt_text: None = None


class FunctionCallDelta(msgspec.Struct, frozen=True):
    """A piece of a function call."""

    name: Annotated[str | msgspec.UnsetType, field("name of the tool.", "weather")]
    arguments: ToolArguments


class ToolCallPiece(msgspec.Struct, frozen=True):
    """Addition of an event to the tool call `index`; id, type and name come with the first."""

    index: Annotated[int, field("place of the call in the answer, from 0.", 0)]
    id: Annotated[
        str | msgspec.UnsetType, field("id that the tool's result refers to.", "call_5d0f")
    ]
    type: Literal["function"] | msgspec.UnsetType
    function: Annotated[FunctionCallDelta, field("name and arguments of the call.")]


class ChatDelta(msgspec.Struct, frozen=True, kw_only=True):
    """Addition of an event to a message.

    The role comes with the first, hidden states in an event of their own behind the last.
    """

    role: Literal["assistant"] | msgspec.UnsetType = msgspec.UNSET
    content: Annotated[
        str | list[ImagePart] | msgspec.UnsetType,
        field("text of the answer, or what is new of it.", "Paris"),
    ] = msgspec.UNSET
    tool_calls: Annotated[list[ToolCallPiece] | msgspec.UnsetType, field("calls of tools.")] = (
        msgspec.UNSET
    )
    reasoning: Annotated[
        str | msgspec.UnsetType,
        field("reasoning before the answer, or what is new of it.", "France, so"),
    ] = msgspec.UNSET
    reasoning_content: Annotated[
        str | msgspec.UnsetType,
        field("the same as `reasoning`, under vLLM's older name.", "France, so"),
    ] = msgspec.UNSET
    audio: Annotated[AudioDelta | msgspec.UnsetType, field("sound of the answer.")] = msgspec.UNSET
    hidden_states: ShownStates = msgspec.UNSET


class ChatChunkChoice(msgspec.Struct, frozen=True):
    """A piece of one answer.

    The first has the role and no `token_ids`; only the last has `stop_reason`.
    """

    index: ListIndex
    delta: Annotated[ChatDelta, field("what is new.")]
    logprobs: Annotated[
        ChatLogprobs | None, field("logprobs of the tokens; null unless asked for.")
    ] = None
    finish_reason: FinishReason = None
    stop_reason: Annotated[
        int | str | msgspec.UnsetType | None,
        field(
            "stop string, or id of `stop_token_ids`, that ended the answer; null otherwise.", "\n\n"
        ),
    ] = msgspec.UNSET
    token_ids: Annotated[
        list[int] | msgspec.UnsetType | None,
        field("ids of the answer's tokens; null unless asked for.", [464, 29]),
    ] = msgspec.UNSET
    weight_versions: WeightVersions = msgspec.UNSET


class ChatChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Event of a chat stream.

    The first event of a choice has the prompt's fields, the last one `system_fingerprint`. Where a
    request has `modalities`, events with a choice have the `modality` of what they bring, as
    vLLM-Omni's have, and the `stage` that made it, by the name of its workers.
    """

    id: Annotated[str, field("id of this answer.", "chatcmpl-5d0f")]
    object: Literal["chat.completion.chunk"] = "chat.completion.chunk"
    created: CreatedAt
    model: ModelName
    choices: Annotated[list[ChatChunkChoice], field("answers; in a stream, what is new of them.")]
    usage: Annotated[
        UsageInfo | msgspec.UnsetType, field("Positions and tokens of this answer.")
    ] = msgspec.UNSET
    system_fingerprint: Fingerprint = msgspec.UNSET
    metrics: ChunkMetrics = msgspec.UNSET
    prompt_token_ids: Annotated[
        list[int] | msgspec.UnsetType | None,
        field("ids of the prompt; null unless asked for, and where it holds embeddings.", [1, 887]),
    ] = msgspec.UNSET
    prompt_text: msgspec.UnsetType | None = msgspec.UNSET
    modality: Annotated[
        Literal["text", "image", "audio"] | msgspec.UnsetType,
        field("kind of what is in this event, of a request with `modalities`.", "image"),
    ] = msgspec.UNSET
    stage: Annotated[
        str | msgspec.UnsetType, field("stage of the pipeline that made it.", "my-pipeline/denoise")
    ] = msgspec.UNSET
