"""An example for every field of a request, for the API reference.

Booleans and fields of a few words need none here: theirs is a value that is not the default.
"""

from collections.abc import Mapping
from typing import Any

_QUESTION = "What is the capital of France?"
_CHAT = [{"role": "user", "content": _QUESTION}]
_ADDRESS = "https://example.com/harbour"
_SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
_FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": _SCHEMA}
_ROWS = "<base64 of a tensor file>"

FIELD_EXAMPLES: Mapping[str, Any] = {
    # prompts
    "model": "my-model",
    "prompt": _QUESTION,
    "messages": _CHAT,
    "input": [_QUESTION],
    "instructions": "Answer in one word.",
    "system": "Answer in one word.",
    "suffix": " in the end.",
    "prompt_embeds": {"ref": "pe-..."},
    "data": _ROWS,
    "ref": "pe-...",
    "part": "rows",
    "uuid": "harbour-1",
    "text": "a red fox",
    "token_ids": [1, 2, 3],
    "tokens": [1, 2, 3],
    "image_url": {"url": f"{_ADDRESS}.jpg"},
    "image_embeds": _ROWS,
    "detail": "low",
    "audio_url": {"url": f"{_ADDRESS}.wav"},
    "audio_embeds": _ROWS,
    "input_audio": {"data": "<base64 of a file>", "format": "wav"},
    "video_url": {"url": f"{_ADDRESS}.mp4"},
    "chat_template_kwargs": {"enable_thinking": False},
    "prompt_name": "query",
    "truncate_prompt_tokens": 512,
    "nearest": 3,
    "noise": 0.5,
    # scores
    "query": "a fox",
    "queries": "a fox",
    "documents": ["a stone", "an animal"],
    "items": ["a stone", "an animal"],
    "text_1": "a fox",
    "text_2": ["a stone", "an animal"],
    "data_1": "a fox",
    "data_2": ["a stone", "an animal"],
    "max_tokens_per_doc": 512,
    "max_tokens_per_query": 64,
    "top_n": 1,
    "task": "embed",
    "dimensions": 256,
    # sampling
    "n": 1,
    "best_of": 4,
    "max_tokens": 64,
    "max_completion_tokens": 64,
    "max_output_tokens": 64,
    "min_tokens": 8,
    "temperature": 0,
    "top_p": 0.9,
    "top_k": 40,
    "min_p": 0.05,
    "repetition_penalty": 1.1,
    "presence_penalty": 0.5,
    "frequency_penalty": 0.5,
    "seed": 1,
    "stop": ["\n\n"],
    "stop_sequences": ["\n\n"],
    "stop_token_ids": [2],
    "bad_words": ["perhaps"],
    "allowed_token_ids": [1, 2, 3],
    "logit_bias": {"2": -100},
    "logprobs": 3,
    "ChatRequest.logprobs": True,
    "top_logprobs": 3,
    "logprob_token_ids": [1, 2],
    "include": ["message.output_text.logprobs"],
    "stream_options": {"include_usage": True},
    # form of the answer
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": "required",
    "max_tool_calls": 4,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    "structured_outputs": {"choice": ["yes", "no"]},
    "format": {"type": "json_schema", "name": "city", "schema": _SCHEMA},
    "verbosity": "medium",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "effort": "low",
    "summary": "auto",
    "thinking": {"type": "enabled", "budget_tokens": 128},
    "thinking_token_budget": 128,
    "output_config": {"effort": "low"},
    "modalities": ["text"],
    "audio": {"voice": "Chelsie", "format": "wav"},
    "voice": "Chelsie",
    # images
    "size": "512x512",
    "negative_prompt": "blurred",
    "num_inference_steps": 20,
    "guidance_scale": 4.5,
    "partial_images": 2,
    "negative_prompt_embeds": _ROWS,
    "pooled_prompt_embeds": _ROWS,
    # whose request it is, and where it goes
    "user": "somebody",
    "safety_identifier": "somebody",
    "metadata": {"ticket": "17"},
    "request_id": "my-request-1",
    "session_id": "my-chat-1",
    "prompt_cache_key": "my-chat-1",
    "cache_salt": "a secret of this user's",
    "cache_control": {"type": "ephemeral"},
    "priority": 1,
    "service_tier": "auto",
    "truncation": "disabled",
    # adapters
    "lora_name": "my-adapter",
    "lora_path": "/adapters/mine",
    "lora_int_id": 1,
    "base_model_name": "my-model",
    "drain_timeout": 30,
    "source": {"uri": "hf://somebody/my-adapter", "sha256": "0" * 64},
    "uri": "hf://somebody/my-adapter",
    "sha256": "0" * 64,
    # where a name means something else
    "EncodeRequest.input": f"{_ADDRESS}.jpg",
    "ResponsesRequest.input": _QUESTION,
    "AudioOptions.format": "wav",
    "ResponsesRequest.text": {"format": {"type": "text"}},
    "ResponsesRequest.stream_options": {"include_obfuscation": False},
    "ResponsesRequest.tools": [{"type": "function", **_FUNCTION}],
    "MessagesRequest.metadata": {"user_id": "somebody"},
    "OutputConfig.format": {"type": "json_schema", "schema": _SCHEMA},
    "ImagesRequest.response_format": "b64_json",
    "SpeechRequest.input": "Good morning.",
    "SpeechRequest.instructions": "Read the text aloud, slowly.",
    "SpeechRequest.response_format": "pcm",
    "SpeechRequest.max_new_tokens": 1500,
    "VoiceId.id": "Chelsie",
    "ImagesRequest.prompt": "a red fox",
    "ImagesRequest.n": 2,
    **{
        f"Messages{kind}.{field}": value
        for kind in ("Input", "Request")
        for field, value in {
            "tools": [{"name": "weather", "input_schema": _SCHEMA}],
            "tool_choice": {"type": "any"},
        }.items()
    },
}
"""Values by field, or by type and field."""
