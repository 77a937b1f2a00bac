"""A chat, as every API that has chats asks for it."""

from typing import Annotated, Any, Literal

import msgspec

from inlay.api.schema.described import CHAT, FUNCTION
from inlay.api.schema.generation import GenerationRequest
from inlay.api.schema.unserved import Unserved
from inlay.messages.fields import Bounds, example, field


class AudioOptions(msgspec.Struct, frozen=True):
    """Sound of an answer, as OpenAI's.

    Attributes:
        voice: one of the model's.
        format: "mp3", "opus", "flac", "wav" or "pcm16"; of a stream "pcm16".
    """

    voice: Annotated[str, example("Chelsie")]
    format: Annotated[str, example("wav")]


class ChatRequest(GenerationRequest, kw_only=True):
    """A chat: the request of `/v1/chat/completions`, and what other APIs are translated to.

    What the engine of a model does not do is a 400; `/v1/models` names it under `refusals`.

    Attributes:
        messages: as OpenAI's; further fields are passed on to the chat template. Content parts:
            `text`, `prompt_embeds` with exactly one of `data` (base64), `ref`, `part`, and of
            models that take them `image_url`, `image_embeds`, `input_audio`, `audio_url`,
            `audio_embeds`, `video_url`.
        tools: functions the model may call, at most 1024.
        tool_choice: "none", "auto", "required", or `{"type": "function", "function": {"name":
            ...}}`; with `tools` "auto" when absent. All but "none" need `tools`.
        parallel_tool_calls: false allows at most one call; true when absent.
        include_reasoning: false leaves the reasoning out of the answer; true when absent.
        reasoning_effort: a value that the chat template reads; "none" switches reasoning off.
            Ignored where the template has no such setting.
        chat_template_kwargs: variables for the chat template; those that fields of the request set
            are refused.
        continue_final_message: the output continues the last message; false when absent.
        logprobs: return the logprob of each token; false when absent.
        top_logprobs: alternatives for each token, 0 (when absent) to --max-logprobs; only with
            `logprobs`.
        add_generation_prompt: end the chat where the answer begins; true when absent, unless
            `continue_final_message` is, which it excludes.
        modalities: ["text"], as when absent, or ["text", "image"] of a pipeline that draws what it
            has written, or ["text", "audio"] of one that speaks it.
        audio: how it is spoken; needed with that modality, and refused without it.
        size: of the image, "WIDTHxHEIGHT" in pixels; the model's own when absent or "auto". Refused
            without that modality, as the next ones.
        num_inference_steps: of the image; the model's own when absent.
        guidance_scale: of the image; the model's own when absent. Refused where the model takes
            none.
        negative_prompt: text of what the image should not show. Refused where the model takes none.
        output_format: of the image's file; "png" when absent.
        service_tier: "flex" gives way to all other requests, as batches do; others change nothing.
        add_special_tokens: accepted; a chat has the special tokens of its template.
    """

    messages: Annotated[list[dict[str, Any]], example(CHAT)]
    max_completion_tokens: Annotated[
        int | None,
        field(
            "OpenAI's newer name of `max_tokens`, over which it takes precedence.",
            64,
            bounds=Bounds(1),
        ),
    ] = None
    best_of: Annotated[
        int | None, field("only the value of `n`: all choices are returned.", 1, bounds=Bounds(1))
    ] = None
    echo: Annotated[
        bool | None, field("only false: the last message is the client's own.", False)
    ] = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int | None, example(3)] = None
    tools: Annotated[
        list[dict[str, Any]] | None, example([{"type": "function", "function": FUNCTION}])
    ] = None
    tool_choice: Annotated[str | dict[str, Any] | None, example("required")] = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    reasoning_effort: Annotated[str | None, example("low")] = None
    chat_template_kwargs: Annotated[dict[str, Any] | None, example({"enable_thinking": False})] = (
        None
    )
    modalities: Annotated[list[str] | None, example(["text"])] = None
    audio: Annotated[AudioOptions | None, example({"voice": "Chelsie", "format": "wav"})] = None
    size: Annotated[str | None, example("512x512")] = None
    num_inference_steps: Annotated[int | None, example(20)] = None
    guidance_scale: Annotated[float | None, example(4.5)] = None
    negative_prompt: Annotated[str | None, example("blurred")] = None
    output_format: Literal["png", "jpeg", "webp"] | None = None
    service_tier: Annotated[str | None, example("flex")] = None

    chat_template: Unserved = None
    documents: Unserved = None
    function_call: Unserved = None
    functions: Unserved = None
    moderation: Unserved = None
    web_search_options: Unserved = None
