"""Requests to try, for the API reference. None needs a model's name where one is served."""

from collections.abc import Mapping
from typing import Any

from inlay.api.schema.described import QUESTION

_PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGUlEQVR42m"
    "NsaGhgIAUwMZAIRjWMahg6GgDJTAGg54KQ4AAAAABJRU5ErkJggg=="
)
"""A grey picture of 16 x 16 pixels."""

EXAMPLES: Mapping[str, Mapping[str, Mapping[str, Any]]] = {
    "/v1/completions": {
        "text": {"prompt": "Once upon a time", "max_tokens": 16},
        "embeddings that are stored": {"prompt_embeds": {"ref": "pe-..."}, "max_tokens": 16},
        "text beside embeddings": {
            "prompt": [
                {"type": "text", "text": "Summarize: "},
                {"type": "prompt_embeds", "data": "<base64 of a tensor file>"},
            ]
        },
        "hidden states of the prompt": {
            "prompt": "Once upon a time",
            "max_tokens": 0,
            "hidden_states": {"layers": [-1], "of": "prompt", "format": "ref"},
        },
        "logprobs, greedy": {
            "prompt": "One, two,",
            "temperature": 0,
            "logprobs": 3,
            "max_tokens": 4,
        },
    },
    "/v1/chat/completions": {
        "question": {"messages": [{"role": "user", "content": QUESTION}]},
        "stream": {"messages": [{"role": "user", "content": QUESTION}], "stream": True},
        "embeddings in a message": {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "prompt_embeds", "ref": "pe-..."},
                        {"type": "text", "text": "What does it say?"},
                    ],
                }
            ]
        },
        "picture": {
            "messages": [
                {
                    "role": "user",
                    "content": [
                        {"type": "image_url", "image_url": {"url": _PIXEL}},
                        {"type": "text", "text": "What is this?"},
                    ],
                }
            ]
        },
    },
    "/v1/responses": {"question": {"input": QUESTION}},
    "/v1/decisions": {
        "question": {
            "input": "The parcel came late, and the lamp in it is broken.",
            "questions": [
                {"type": "predicate", "instructions": "Is something damaged?"},
                {
                    "type": "choice",
                    "instructions": "Which team?",
                    "choices": [{"value": "billing"}, {"value": "returns"}],
                },
            ],
        }
    },
    "/v1/messages": {
        "question": {"max_tokens": 64, "messages": [{"role": "user", "content": QUESTION}]},
        "thinking": {
            "max_tokens": 256,
            "thinking": {"type": "enabled", "budget_tokens": 128},
            "messages": [{"role": "user", "content": QUESTION}],
        },
    },
    "/v1/messages/count_tokens": {
        "question": {"messages": [{"role": "user", "content": QUESTION}]},
    },
    "/v1/embeddings": {
        "texts": {"input": ["a red fox", "a green frog"]},
        "embeddings that are stored": {"prompt_embeds": {"ref": "pe-..."}},
    },
    "/v1/score": {"pairs": {"text_1": "a fox", "text_2": ["an animal", "a stone"]}},
    "/v1/rerank": {"documents": {"query": "a fox", "documents": ["a stone", "an animal"]}},
    "/v1/encode": {"picture": {"input": _PIXEL}},
    "/v1/images/generations": {
        "image": {"prompt": "a red fox"},
        "stream": {"prompt": "a red fox", "stream": True, "partial_images": 2, "seed": 1},
    },
    "/v1/audio/speech": {
        "file": {"input": "Good morning.", "voice": "Chelsie"},
        "pieces": {"input": "Good morning.", "response_format": "pcm"},
        "events": {
            "input": "Good morning.",
            "instructions": "Read the text aloud, slowly.",
            "stream_format": "sse",
        },
    },
    "/v1/prompt_embeds/encode": {"text": {"prompt": QUESTION}},
    "/tokenize": {"text": {"prompt": QUESTION, "return_token_strs": True}},
    "/detokenize": {"ids": {"tokens": [1, 2, 3]}},
}
"""Bodies by route, and by a description of a few words."""
