"""Types of `/v1/responses`."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.chat import TokenLogprob
from inlay.api.schema.described import (
    QUESTION,
    SCHEMA,
    AnswerText,
    CachedTokens,
    CreatedAt,
    ModelName,
    NotCounted,
    OutputTokens,
    PromptTokens,
    ReasoningTokens,
    Stages,
    ToolArguments,
    ToolName,
    TotalTokens,
)
from inlay.api.schema.generation import RequestFields
from inlay.api.schema.hidden_states import ShownStates
from inlay.api.schema.unserved import Unserved, named_elsewhere
from inlay.messages.fields import example, field

ELSEWHERE = {
    "messages": "input",
    "max_tokens": "max_output_tokens",
    "max_completion_tokens": "max_output_tokens",
    "response_format": "text.format",
}
"""Fields of chat completions that are refused, and their names in responses."""


class ReasoningOptions(msgspec.Struct, frozen=True):
    """Options of reasoning.

    Attributes:
        effort: value for the chat template; "none" switches reasoning off. Ignored where the
            template has no such setting.
        summary: accepted and ignored; reasoning is returned whole.
    """

    effort: Annotated[str | None, example("low")] = None
    summary: Annotated[str | None, example("auto")] = None


class TextOptions(msgspec.Struct, frozen=True):
    """Format of the answer's text.

    Attributes:
        format: an object of type "text" (as when absent), "json_object" or "json_schema", the last
            with `name` and `schema`.
        verbosity: accepted; models here have no such setting.
    """

    format: Annotated[
        dict[str, Any] | None, example({"type": "json_schema", "name": "city", "schema": SCHEMA})
    ] = None
    verbosity: Literal["low", "medium", "high"] | None = None


class StreamOptions(msgspec.Struct, frozen=True):
    """Options of a stream; no obfuscation is ever added.

    Attributes:
        include_obfuscation: accepted; nothing is added.
    """

    include_obfuscation: bool | None = None


class ResponsesRequest(RequestFields, kw_only=True):
    """A request to `/v1/responses`.

    Names beyond OpenAI's are vLLM's, and mean what they mean in chat completions.

    Attributes:
        model: served name; when absent the first model that fits the route.
        input: text, or items: messages, function calls, their outputs, reasoning. Needed, and not
            empty. Parts of a content: `input_text`, `output_text`, `refusal`, `prompt_embeds` with
            exactly one of `data` (base64), `ref`, `part`, and of models that take them
            `input_image`, `image_embeds`, `input_audio`, `audio_url`, `audio_embeds`, `video_url`.
        instructions: a system message before all others.
        n: only 1: a response has one answer.
        include: "message.output_text.logprobs" requests logprobs; OpenAI's other values have no
            effect, and unknown ones are refused.
        store: keep the response with its input, true when absent, on a server with
            --response-store; without one accepted, and nothing is ever stored.
        background: answer at once and go on without the client; needs `store`. Only with
            --response-store.
        previous_response_id: go on after this response: its items come before `input`, its
            instructions do not. Only with --response-store.
        conversation: id of a conversation, or an object with its `id`, to which input and output
            are added; its items come before `input`. Only with --response-store.
        text: format of the answer.
        tools: functions, at most 1024: `{"type": "function", "name", "description", "parameters"}`.
        truncation: "auto" leaves the oldest turns out where the input is too long: a call with
            its result, never what the system says, nor the last turn; `dropped_messages` and
            `X-Dropped-Messages` say how many. Else such an input is refused.
        max_output_tokens: output tokens at most, reasoning included, 1 or more; when absent what
            the context leaves.
        max_tool_calls: accepted and returned; no tool is called by the server.
        metadata: returned as it came: at most 16 entries, keys of 64 characters and values of 512.
        parallel_tool_calls: false allows at most one call; true when absent.
        reasoning: effort for the chat template.
        prompt_cache_options: returned as it came; prefixes are always cached.
        prompt_cache_retention: returned as it came; prefixes are always cached.
        safety_identifier: returned as it came.
        service_tier: "flex" gives way to all other requests, as batches do; others change nothing.
        tool_choice: "none", "auto", "required", `{"type": "function", "name"}`, or `{"type":
            "allowed_tools", "mode", "tools"}`; with `tools` "auto" when absent.
        top_logprobs: alternatives for each token, 0 (when absent) to --max-logprobs; only where
            `include` has "message.output_text.logprobs".
        stream_options: options of the stream; only with `stream`. Usage is in the last event
            anyway.
        request_id: the whole `id` of the answer: 1 to 128 visible ASCII characters; random when
            absent.
        user: returned as it came; nothing depends on it.
        structured_outputs: vLLM's: an object with one of json, regex, choice, grammar, json_object,
            as far as the engine has them; not beside a `text.format` that is not text.
    """

    input: Annotated[str | list[dict[str, Any]] | None, example(QUESTION)] = None
    instructions: Annotated[str | None, example("Answer in one word.")] = None
    include: Annotated[list[str] | None, example(["message.output_text.logprobs"])] = None
    max_output_tokens: Annotated[int | None, example(64)] = None
    max_tool_calls: Annotated[int | None, example(4)] = None
    metadata: Annotated[dict[str, str] | None, example({"ticket": "17"})] = None
    parallel_tool_calls: bool | None = None
    reasoning: Annotated[ReasoningOptions | None, example({"effort": "low"})] = None
    safety_identifier: Annotated[str | None, example("somebody")] = None
    prompt_cache_options: Annotated[Any, example({"mode": "implicit"})] = None
    prompt_cache_retention: Annotated[str | None, example("24h")] = None
    service_tier: Annotated[str | None, example("flex")] = None
    store: bool | None = None
    stream_options: Annotated[StreamOptions | None, example({"include_obfuscation": False})] = None
    text: Annotated[TextOptions | None, example({"format": {"type": "text"}})] = None
    tool_choice: Annotated[str | dict[str, Any] | None, example("required")] = None
    tools: Annotated[
        list[dict[str, Any]] | None,
        example(
            [
                {
                    "description": "The weather of a city.",
                    "name": "weather",
                    "parameters": SCHEMA,
                    "type": "function",
                }
            ]
        ),
    ] = None
    top_logprobs: Annotated[int | None, example(3)] = None
    truncation: Annotated[Literal["auto", "disabled"] | None, example("auto")] = None

    include_reasoning: bool | None = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, example({"enable_thinking": False})] = (
        None
    )

    background: bool | None = None
    conversation: Annotated[str | dict[str, Any] | None, example("conv_5d0f")] = None
    previous_response_id: Annotated[str | None, example("resp_5d0f")] = None

    context_management: Unserved = None
    enable_response_messages: Unserved = None
    image: Unserved = None
    moderation: Unserved = None
    previous_input_messages: Unserved = None
    prompt: Unserved = None

    messages: Annotated[Any, named_elsewhere(ELSEWHERE["messages"])] = None
    max_tokens: Annotated[Any, named_elsewhere(ELSEWHERE["max_tokens"])] = None
    max_completion_tokens: Annotated[Any, named_elsewhere(ELSEWHERE["max_completion_tokens"])] = (
        None
    )
    response_format: Annotated[Any, named_elsewhere(ELSEWHERE["response_format"])] = None


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    """Text of a message."""

    text: AnswerText
    annotations: Annotated[list[Any], field("Always empty.", [])] = []
    logprobs: Annotated[
        list[TokenLogprob], field("logprobs of the tokens; null unless asked for.")
    ] = []


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    """Text of reasoning."""

    text: Annotated[str, field("text of the reasoning.", "France, so")]


ResponseStatus: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    """A message of the assistant."""

    id: Annotated[str, field("id of the item.", "msg_5d0f")]
    status: Annotated[
        ItemStatus, field("state of the item, or of the whole response.", "completed")
    ]
    content: Annotated[list[OutputText], field("parts of the message.")]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, frozen=True, tag="reasoning", tag_field="type"):
    """The assistant's reasoning, whole: neither summarised nor encrypted."""

    id: Annotated[str, field("id of the item.", "rs_5d0f")]
    status: Annotated[
        ItemStatus, field("state of the item, or of the whole response.", "completed")
    ]
    content: Annotated[list[ReasoningText], field("parts of the reasoning.")]
    summary: Annotated[list[Any], field("Always empty: reasoning is shown whole.", [])] = []
    encrypted_content: None = None


class OutputFunctionCall(msgspec.Struct, frozen=True, tag="function_call", tag_field="type"):
    """A function call of the assistant.

    `arguments` is JSON text, as the model wrote it.
    """

    id: Annotated[str, field("id of the item.", "fc_5d0f")]
    status: Annotated[
        ItemStatus, field("state of the item, or of the whole response.", "completed")
    ]
    call_id: Annotated[str, field("id that the tool's result refers to.", "call_5d0f")]
    name: ToolName
    arguments: ToolArguments


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Counts of the prompt's positions. Positions written to the cache are not counted."""

    cached_tokens: CachedTokens
    cache_write_tokens: NotCounted = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Counts of the output's tokens."""

    reasoning_tokens: ReasoningTokens


class ResponsesUsage(msgspec.Struct, frozen=True):
    """Prompt and output positions; embedding vectors count as tokens."""

    input_tokens: PromptTokens
    input_tokens_details: Annotated[InputTokensDetails, field("more about the prompt.")]
    output_tokens: OutputTokens
    output_tokens_details: Annotated[OutputTokensDetails, field("more about the answer.")]
    total_tokens: TotalTokens
    stages: Stages = msgspec.UNSET


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Reason of an answer that ended early."""

    reason: Literal["max_output_tokens"]


class FailureDetails(msgspec.Struct, frozen=True):
    """Code and message of a response that failed."""

    code: Annotated[str, field("kind of the error.", "server_error")]
    message: Annotated[str, field("what is wrong.", "the worker was lost")]


class ConversationRef(msgspec.Struct, frozen=True):
    """The conversation that a response belongs to."""

    id: Annotated[str, field("id of the conversation.", "conv_5d0f")]


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/responses`.

    The request's fields are repeated; `temperature` and `top_p` are the values that were used.
    """

    id: Annotated[str, field("id of this answer.", "resp_5d0f")]
    object: Literal["response"] = "response"
    created_at: CreatedAt
    completed_at: Annotated[
        int | None, field("Unix time at which it ended normally.", 1764000004)
    ] = None
    status: Annotated[
        ResponseStatus, field("state of the item, or of the whole response.", "completed")
    ]
    background: Annotated[bool, field("no client waits for it.")] = False
    conversation: Annotated[ConversationRef | None, field("conversation that it belongs to.")] = (
        None
    )
    error: Annotated[FailureDetails | None, field("the error.")] = None
    incomplete_details: Annotated[IncompleteDetails | None, field("reason of an early end.")] = None
    instructions: Annotated[str | None, field("as the request had it.", "Answer in one word.")]
    max_output_tokens: Annotated[int | None, field("as the request had it.", 64)]
    max_tool_calls: Annotated[int | None, field("as the request had it.", 4)]
    metadata: Annotated[dict[str, str], field("as the request had it.", {"ticket": "17"})]
    model: ModelName
    output: Annotated[list[OutputItem], field("items of the answer.")] = []
    parallel_tool_calls: Annotated[bool, field("as the request had it.")]
    previous_response_id: Annotated[
        str | None, field("response that it goes on with.", "resp_5d0f")
    ] = None
    prompt_cache_key: Annotated[str | None, field("as the request had it.", "my-chat-1")]
    prompt_cache_options: Annotated[
        Any, field("as the request had it; prefixes are always cached.", {"mode": "implicit"})
    ] = None
    prompt_cache_retention: Annotated[str | None, field("as the request had it.", "24h")] = None
    reasoning: Annotated[ReasoningOptions, field("as the request had it.")]
    safety_identifier: Annotated[str | None, field("as the request had it.", "somebody")]
    service_tier: Annotated[
        Literal["default", "flex"], field('"flex" where the request said so, else "default".')
    ] = "default"
    store: Annotated[bool, field("it is kept.")] = False
    temperature: Annotated[float, field("the value that was used.", 1.0)]
    text: Annotated[TextOptions, field("form of the text, as the request had it.")]
    tool_choice: Annotated[str | dict[str, Any], field("as the request had it.", "auto")]
    tools: Annotated[
        list[dict[str, Any]],
        field("as the request had it.", [{"name": "weather", "type": "function"}]),
    ]
    top_logprobs: Annotated[int, field("as the request had it.", 0)]
    top_p: Annotated[float, field("the value that was used.", 1.0)]
    truncation: Annotated[
        Literal["auto", "disabled"], field("as the request had it.", "disabled")
    ] = "disabled"
    usage: Annotated[ResponsesUsage | None, field("Positions and tokens of this answer.")] = None
    user: Annotated[str | None, field("as the request had it.", "somebody")]
    hidden_states: ShownStates = msgspec.UNSET
    dropped_messages: Annotated[
        int | msgspec.UnsetType,
        field("messages that `truncation` left out; absent where there are none.", 2),
    ] = msgspec.UNSET


class InputTokens(msgspec.Struct, frozen=True):
    """The response of `/v1/responses/input_tokens`; rows of embeddings and images count too."""

    input_tokens: PromptTokens
    object: Literal["response.input_tokens"] = "response.input_tokens"
