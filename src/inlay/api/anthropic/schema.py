"""Types of `/v1/messages` and `/v1/messages/count_tokens`."""

from datetime import datetime
from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.schema.described import (
    CHAT,
    SCHEMA,
    AnswerText,
    CachedTokens,
    ListIndex,
    ModelName,
    OutputTokens,
    PromptTokens,
    ReasoningTokens,
    Stages,
    ToolName,
)
from inlay.api.schema.unserved import Unserved
from inlay.messages.fields import (
    IgnoreEos,
    MinP,
    MinTokens,
    RepetitionPenalty,
    Temperature,
    TopK,
    TopP,
    example,
    field,
)


class OutputConfig(msgspec.Struct, frozen=True):
    """Options of the output.

    Attributes:
        effort: a value that the chat template reads; "none" switches reasoning off. Ignored where
            the template has no such setting.
        format: an object of type "json_schema" with `schema`, which the answer will match.
    """

    effort: Annotated[str | None, example("low")] = None
    format: Annotated[dict[str, Any] | None, example({"type": "json_schema", "schema": SCHEMA})] = (
        None
    )


class MessagesInput(msgspec.Struct, kw_only=True):
    """Fields that make the prompt. Names beyond Anthropic's are those of chat completions.

    Attributes:
        model: served name; when absent the first model that fits the route.
        messages: turns of `user`, `assistant` and `system`. Blocks of a user: `text`, `image` (its
            `source` of type "base64", "url" or "file"), `prompt_embeds` with exactly one of `data`
            (base64), `ref`, `part`, and `tool_result`; of the assistant: `text`, `prompt_embeds`,
            `thinking`, `redacted_thinking`, `tool_use`; of the system: `text`, `prompt_embeds`. An
            answer continues a last turn of the assistant.
        system: a text, or blocks of `text` and `prompt_embeds`.
        tools: functions, with `name`, `description`, `input_schema` and `strict`; at most 1024.
        tool_choice: an object of type "auto", "any", "tool" (with `name`) or "none"; with `tools`
            "auto" when absent. All but the first and the last need `tools`.
            `disable_parallel_tool_use` allows at most one call.
        thinking: an object of type "enabled" (with `budget_tokens`, 1 or more, which binds models
            that reason between two tags), "adaptive" or "disabled"; the last, and `display`
            "omitted", leave the thinking out of the answer.
        output_config: format of the answer, and effort.
        cache_control: accepted and not used, here and in blocks: prefixes are always cached.
        chat_template_kwargs: variables for the chat template.
    """

    messages: Annotated[list[dict[str, Any]], example(CHAT)]
    model: str | None = None
    system: Annotated[str | list[dict[str, Any]] | None, example("Answer in one word.")] = None
    tools: Annotated[
        list[dict[str, Any]] | None, example([{"name": "weather", "input_schema": SCHEMA}])
    ] = None
    tool_choice: Annotated[dict[str, Any] | None, example({"type": "any"})] = None
    thinking: Annotated[
        dict[str, Any] | None, example({"type": "enabled", "budget_tokens": 128})
    ] = None
    output_config: Annotated[OutputConfig | None, example({"effort": "low"})] = None
    cache_control: Annotated[dict[str, Any] | None, example({"type": "ephemeral"})] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, example({"enable_thinking": False})] = (
        None
    )

    container: Unserved = None
    context_management: Unserved = None
    mcp_servers: Unserved = None


class MessagesRequest(MessagesInput, kw_only=True):
    """A request to `/v1/messages`; other fields mean what they mean in chat completions.

    Attributes:
        max_tokens: output tokens at most, 1 or more.
        metadata: accepted and not used.
        service_tier: accepted and not used.
        stop_sequences: strings at which the answer ends, before their first match; at most 64, of
            4,096 characters each and 16,384 together.
        seed: of the sampling; random when absent or -1. Refused where the engine draws without one,
            unless `temperature` is 0.
        request_id: the answer's `id`, behind "msg_": 1 to 128 visible ASCII characters; random when
            absent.
    """

    max_tokens: int
    metadata: Annotated[dict[str, Any] | None, example({"user_id": "somebody"})] = None
    service_tier: Annotated[str | None, example("flex")] = None
    stop_sequences: Annotated[list[str] | None, example(["\n\n"])] = None
    stream: bool | None = None

    temperature: Temperature = None
    top_k: TopK = None
    top_p: TopP = None
    min_p: MinP = None
    min_tokens: MinTokens = None
    repetition_penalty: RepetitionPenalty = None
    ignore_eos: IgnoreEos = None
    seed: int | None = None
    stop_token_ids: list[int] | None = None
    logit_bias: dict[str, float] | None = None
    cache_salt: str | None = None
    prompt_cache_key: str | None = None
    session_id: str | None = None
    request_id: str | None = None
    priority: int | None = None

    ec_transfer_params: Unserved = None
    kv_transfer_params: Unserved = None
    mm_payload: Unserved = None
    return_mm_kwargs: Unserved = None
    vllm_xargs: Unserved = None
    watermarking: Unserved = None


class TokenCount(msgspec.Struct, frozen=True):
    """The response of `/v1/messages/count_tokens`; rows of embeddings and images count too."""

    input_tokens: PromptTokens


class ModelInfo(msgspec.Struct, frozen=True, kw_only=True, tag="model", tag_field="type"):
    """A model that `/v1/messages` serves.

    Attributes:
        created_at: start of the server.
        max_input_tokens: positions of prompt and answer together.
        max_tokens: the same: what the prompt leaves of it is the answer's.
    """

    id: Annotated[str, field("name to send as `model`.", "my-model")]
    display_name: Annotated[str, field("the same as `id`.", "my-model")]
    created_at: Annotated[datetime, example("2026-11-24T00:00:00Z")]
    lifecycle: Literal["active"] = "active"
    max_input_tokens: Annotated[int, example(4096)]
    max_tokens: Annotated[int, example(4096)]


class ModelPage(msgspec.Struct, frozen=True, kw_only=True):
    """Models, where `anthropic-version` is sent; `after_id` and `before_id` ask for the others."""

    data: Annotated[list[ModelInfo], field("the entries.")]
    first_id: Annotated[str | None, field("first id of this page.", "my-model")]
    last_id: Annotated[str | None, field("last id of this page.", "my-model")]
    has_more: Annotated[bool, field("True if there are more pages.", False)]


class TextBlock(msgspec.Struct, frozen=True, tag="text", tag_field="type"):
    """Text of the answer."""

    text: AnswerText


class ThinkingBlock(msgspec.Struct, frozen=True, tag="thinking", tag_field="type"):
    """Reasoning before the answer. `signature` is empty: nothing checks it when it comes back."""

    thinking: Annotated[str, field("reasoning, or what is new of it.", "France, so")]
    signature: Annotated[str, field("Always empty: nothing checks it.", "")] = ""


class ToolUseBlock(msgspec.Struct, frozen=True, tag="tool_use", tag_field="type"):
    """A call of a tool.

    Arguments that are no JSON object, as where `max_tokens` cut them, are the only value of
    `input`, under `unparsed`.
    """

    id: Annotated[str, field("id that the tool's result refers to.", "toolu_5d0f")]
    name: ToolName
    input: Annotated[dict[str, Any], field("arguments of the call.", {"city": "Paris"})]


Block: TypeAlias = TextBlock | ThinkingBlock | ToolUseBlock


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Counts of the output's tokens."""

    thinking_tokens: ReasoningTokens


class Usage(msgspec.Struct, frozen=True, kw_only=True):
    """Positions of the prompt and tokens of the output.

    The prompt is `input_tokens` and `cache_read_input_tokens` together.
    """

    input_tokens: Annotated[int, field("positions of the prompt that were not cached.", 1)]
    cache_creation_input_tokens: Annotated[
        int, field("As in Anthropic's form; inlay does not count it.", 0)
    ] = 0
    cache_read_input_tokens: CachedTokens
    output_tokens: OutputTokens
    output_tokens_details: Annotated[
        OutputTokensDetails | msgspec.UnsetType, field("more about the answer.")
    ] = msgspec.UNSET
    stages: Stages = msgspec.UNSET


StopReason: TypeAlias = Literal["end_turn", "max_tokens", "stop_sequence", "tool_use"]


class Message(msgspec.Struct, frozen=True, kw_only=True, tag="message", tag_field="type"):
    """The response of `/v1/messages`."""

    id: Annotated[str, field("id of this answer.", "msg_5d0f")]
    role: Literal["assistant"] = "assistant"
    model: ModelName
    content: Annotated[list[Block], field("blocks of the answer.")] = []
    stop_reason: Annotated[StopReason | None, field("reason of the end.", "end_turn")] = None
    stop_sequence: Annotated[
        str | None, field("the stop string that ended the answer.", "\n\n")
    ] = None
    usage: Annotated[Usage, field("Positions and tokens of this answer.")]


class MessageStart(msgspec.Struct, frozen=True, tag="message_start", tag_field="type"):
    """First event: the message before its content."""

    message: Annotated[Message, field("the message, still without content.")]


class Ping(msgspec.Struct, frozen=True, tag="ping", tag_field="type"):
    """Event without a meaning."""


class BlockStart(msgspec.Struct, frozen=True, tag="content_block_start", tag_field="type"):
    """Start of a block, which is still empty."""

    index: ListIndex
    content_block: Annotated[Block, field("the block, still empty.")]


class TextDelta(msgspec.Struct, frozen=True, tag="text_delta", tag_field="type"):
    """Addition to a text."""

    text: AnswerText


class ThinkingDelta(msgspec.Struct, frozen=True, tag="thinking_delta", tag_field="type"):
    """Addition to the reasoning."""

    thinking: Annotated[str, field("reasoning, or what is new of it.", "France, so")]


class InputDelta(msgspec.Struct, frozen=True, tag="input_json_delta", tag_field="type"):
    """Addition to the JSON text of a call's input."""

    partial_json: Annotated[str, field("what is new of the JSON text.", '{"city')]


Delta: TypeAlias = TextDelta | ThinkingDelta | InputDelta


class BlockDelta(msgspec.Struct, frozen=True, tag="content_block_delta", tag_field="type"):
    """Addition to a block."""

    index: ListIndex
    delta: Annotated[Delta, field("what is new.")]


class BlockStop(msgspec.Struct, frozen=True, tag="content_block_stop", tag_field="type"):
    """End of a block."""

    index: ListIndex


class Ending(msgspec.Struct, frozen=True):
    """Reason of a message's end."""

    stop_reason: Annotated[StopReason, field("reason of the end.", "end_turn")]
    stop_sequence: Annotated[str | None, field("the stop string that ended the answer.", "\n\n")]


class MessageDelta(msgspec.Struct, frozen=True, tag="message_delta", tag_field="type"):
    """Reason of the end, and the usage in all."""

    delta: Annotated[Ending, field("what is new.")]
    usage: Annotated[Usage, field("Positions and tokens of this answer.")]


class MessageStop(msgspec.Struct, frozen=True, tag="message_stop", tag_field="type"):
    """Last event."""


class ErrorDetail(msgspec.Struct, frozen=True):
    """Kind of an error and its message, which begins with the place in the request."""

    type: Annotated[str, field("kind of the error.", "invalid_request_error")]
    message: Annotated[
        str, field("what is wrong, and what is allowed.", "max_tokens must be 1 or more")
    ]


class Failure(msgspec.Struct, frozen=True, tag="error", tag_field="type"):
    """Every error of this API, as a body and as the last event of a stream."""

    error: Annotated[ErrorDetail, field("the error.")]
    request_id: Annotated[str, field("id of the request, as in the header `request-id`.", "5d0f")]


Event: TypeAlias = (
    MessageStart | Ping | BlockStart | BlockDelta | BlockStop | MessageDelta | MessageStop | Failure
)
