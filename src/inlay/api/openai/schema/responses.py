"""Types of `/v1/responses`."""

from typing import Annotated, Any, Literal, TypeAlias

import msgspec

from inlay.api.openai.schema.chat import TokenLogprob
from inlay.api.schema.generation import RequestFields
from inlay.api.schema.stages import StageUsage
from inlay.api.schema.unserved import Unserved, named_elsewhere

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

    effort: str | None = None
    summary: str | None = None


class TextOptions(msgspec.Struct, frozen=True):
    """Format of the answer's text.

    Attributes:
        format: an object of type "text" (as when absent), "json_object" or "json_schema", the last
            with `name` and `schema`.
        verbosity: accepted; models here have no such setting.
    """

    format: dict[str, Any] | None = None
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
        store: accepted; nothing is ever stored.
        text: format of the answer.
        tools: functions, at most 1024: `{"type": "function", "name", "description", "parameters"}`.
        truncation: only "disabled" is served.
        max_output_tokens: output tokens at most, reasoning included, 1 or more; when absent what
            the context leaves.
        max_tool_calls: accepted and returned; no tool is called by the server.
        metadata: returned as it came: at most 16 entries, keys of 64 characters and values of 512.
        parallel_tool_calls: false allows at most one call; true when absent.
        reasoning: effort for the chat template.
        prompt_cache_options: accepted; prefixes are always cached.
        prompt_cache_retention: accepted; prefixes are always cached.
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

    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    include: list[str] | None = None
    max_output_tokens: int | None = None
    max_tool_calls: int | None = None
    metadata: dict[str, str] | None = None
    parallel_tool_calls: bool | None = None
    reasoning: ReasoningOptions | None = None
    safety_identifier: str | None = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    service_tier: str | None = None
    store: bool | None = None
    stream_options: StreamOptions | None = None
    text: TextOptions | None = None
    tool_choice: str | dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    top_logprobs: int | None = None
    truncation: str | None = None

    include_reasoning: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    background: Unserved = None
    context_management: Unserved = None
    conversation: Unserved = None
    enable_response_messages: Unserved = None
    image: Unserved = None
    moderation: Unserved = None
    previous_input_messages: Unserved = None
    previous_response_id: Unserved = None
    prompt: Unserved = None

    messages: Annotated[Any, named_elsewhere(ELSEWHERE["messages"])] = None
    max_tokens: Annotated[Any, named_elsewhere(ELSEWHERE["max_tokens"])] = None
    max_completion_tokens: Annotated[Any, named_elsewhere(ELSEWHERE["max_completion_tokens"])] = (
        None
    )
    response_format: Annotated[Any, named_elsewhere(ELSEWHERE["response_format"])] = None


class OutputText(msgspec.Struct, frozen=True, tag="output_text", tag_field="type"):
    """Text of a message."""

    text: str
    annotations: list[Any] = []
    logprobs: list[TokenLogprob] = []


class ReasoningText(msgspec.Struct, frozen=True, tag="reasoning_text", tag_field="type"):
    """Text of reasoning."""

    text: str


ItemStatus: TypeAlias = Literal["in_progress", "completed", "incomplete"]


class OutputMessage(msgspec.Struct, frozen=True, tag="message", tag_field="type"):
    """A message of the assistant."""

    id: str
    status: ItemStatus
    content: list[OutputText]
    role: Literal["assistant"] = "assistant"


class OutputReasoning(msgspec.Struct, frozen=True, tag="reasoning", tag_field="type"):
    """The assistant's reasoning, whole: neither summarised nor encrypted."""

    id: str
    status: ItemStatus
    content: list[ReasoningText]
    summary: list[Any] = []
    encrypted_content: None = None


class OutputFunctionCall(msgspec.Struct, frozen=True, tag="function_call", tag_field="type"):
    """A function call of the assistant.

    `arguments` is JSON text, as the model wrote it.
    """

    id: str
    status: ItemStatus
    call_id: str
    name: str
    arguments: str


OutputItem: TypeAlias = OutputMessage | OutputReasoning | OutputFunctionCall


class InputTokensDetails(msgspec.Struct, frozen=True):
    """Counts of the prompt's positions. Positions written to the cache are not counted."""

    cached_tokens: int
    cache_write_tokens: int = 0


class OutputTokensDetails(msgspec.Struct, frozen=True):
    """Counts of the output's tokens."""

    reasoning_tokens: int


class ResponsesUsage(msgspec.Struct, frozen=True):
    """Prompt and output positions; embedding vectors count as tokens."""

    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int
    stages: dict[str, StageUsage] | msgspec.UnsetType = msgspec.UNSET


class IncompleteDetails(msgspec.Struct, frozen=True):
    """Reason of an answer that ended early."""

    reason: Literal["max_output_tokens"]


class FailureDetails(msgspec.Struct, frozen=True):
    """Code and message of a response that failed."""

    code: str
    message: str


class Response(msgspec.Struct, frozen=True, kw_only=True):
    """The response of `/v1/responses`.

    The request's fields are repeated; `temperature` and `top_p` are the values that were used.
    """

    id: str
    object: Literal["response"] = "response"
    created_at: int
    completed_at: int | None = None
    status: Literal["in_progress", "completed", "incomplete", "failed"]
    background: Literal[False] = False
    error: FailureDetails | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None
    max_output_tokens: int | None
    max_tool_calls: int | None
    metadata: dict[str, str]
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool
    previous_response_id: None = None
    prompt_cache_key: str | None
    reasoning: ReasoningOptions
    safety_identifier: str | None
    service_tier: Literal["default", "flex"] = "default"
    store: Literal[False] = False
    temperature: float
    text: TextOptions
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float
    truncation: Literal["disabled"] = "disabled"
    usage: ResponsesUsage | None = None
    user: str | None
