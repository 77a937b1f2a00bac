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
    "prompt": _QUESTION,
    "messages": _CHAT,
    "input": [_QUESTION],
    "instructions": "Answer in one word.",
    "system": "Answer in one word.",
    "suffix": "",
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
    "role": "query",
    "outputs": ["dense", "tokens"],
    "max_active": 256,
    "output": "tokens",
    "input_type": "search_query",
    "query_prompt_name": "query",
    "document_prompt_name": "passage",
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
    # decisions
    "DecisionRequest.input": "The parcel came late.",
    "questions": [{"type": "predicate", "instructions": "Is it urgent?"}],
    "orders": 2,
    **{
        f"{kind}Question.{field}": value
        for kind in ("Predicate", "Choice", "Score")
        for field, value in {"name": "team", "instructions": "Which team?"}.items()
    },
    "ChoiceQuestion.choices": [{"value": "billing"}, {"value": "returns"}],
    "ScoreQuestion.levels": [{"label": "calm"}, {"label": "angry"}],
    "Choice.value": "billing",
    "Choice.description": "payments",
    "Level.label": "calm",
    "Level.description": "no complaint",
    "cache_salt": "a secret of this user's",
    "priority": 1,
    "prompt_cache_key": "my-chat-1",
    # sampling
    "max_output_tokens": 64,
    "stop_sequences": ["\n\n"],
    "logprobs": 3,
    "ChatRequest.best_of": 1,
    "ChatRequest.echo": False,
    "ChatRequest.logprobs": True,
    "top_logprobs": 3,
    "include": ["message.output_text.logprobs"],
    # form of the answer
    "tools": [{"type": "function", "function": _FUNCTION}],
    "tool_choice": "required",
    "max_tool_calls": 4,
    "response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}},
    "structured_outputs": {"choice": ["yes", "no"]},
    "format": {"type": "json_schema", "name": "city", "schema": _SCHEMA},
    "verbosity": "medium",
    "prompt_cache_options": {"mode": "implicit"},
    "prompt_cache_retention": "24h",
    "reasoning": {"effort": "low"},
    "reasoning_effort": "low",
    "effort": "low",
    "summary": "auto",
    "thinking": {"type": "enabled", "budget_tokens": 128},
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
    "safety_identifier": "somebody",
    "metadata": {"ticket": "17"},
    "cache_control": {"type": "ephemeral"},
    "service_tier": "flex",
    "truncation": "disabled",
    # adapters
    "lora_name": "my-adapter",
    "lora_path": "/adapters/mine",
    "lora_int_id": 1,
    "base_model_name": "my-model",
    "is_3d_lora_weight": False,
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
    "BatchRequest.input_file_id": "file-5d0f",
    "BatchRequest.endpoint": "/v1/embeddings",
    "BatchRequest.completion_window": "24h",
    "BatchRequest.metadata": {"job": "harbour"},
    "BatchRequest.output_expires_after": {"anchor": "created_at", "seconds": 86400},
    "ExpiresAfter.seconds": 86400,
    "ExpiresAfter.anchor": "created_at",
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
