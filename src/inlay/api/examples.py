"""Bodies of requests to try, by a description. None needs a model's name where one is served."""

from collections.abc import Mapping
from typing import Any, TypeAlias

from inlay.api.schema.described import CHAT, ROWS

Bodies: TypeAlias = Mapping[str, Mapping[str, Any]]

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAABAAAAAQCAIAAACQkWg2AAAAGUlEQVR42m"
    "NsaGhgIAUwMZAIRjWMahg6GgDJTAGg54KQ4AAAAABJRU5ErkJggg=="
)
"""A grey picture of 16 x 16 pixels."""

_STORED = {"ref": "pe-..."}


def _text(text: str) -> dict[str, Any]:
    return {"type": "text", "text": text}


def _asked(part: Mapping[str, Any], text: str) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": [part, _text(text)]}]}


COMPLETIONS: Bodies = {
    "text": {"prompt": "Once upon a time", "max_tokens": 16},
    "embeddings that are stored": {"prompt_embeds": _STORED, "max_tokens": 16},
    "text beside embeddings": {
        "prompt": [_text("Summarize: "), {"type": "prompt_embeds", "data": ROWS}]
    },
    "hidden states of the prompt": {
        "prompt": "Once upon a time",
        "max_tokens": 0,
        "hidden_states": {"layers": [-1], "of": "prompt", "format": "ref"},
    },
    "logprobs, greedy": {"prompt": "One, two,", "temperature": 0, "logprobs": 3, "max_tokens": 4},
}
CHATS: Bodies = {
    "question": {"messages": CHAT},
    "stream": {"messages": CHAT, "stream": True},
    "embeddings in a message": _asked({"type": "prompt_embeds", **_STORED}, "What does it say?"),
    "picture": _asked({"type": "image_url", "image_url": {"url": PIXEL}}, "What is this?"),
}
DECISIONS: Bodies = {
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
}
MESSAGES: Bodies = {
    "question": {"max_tokens": 64, "messages": CHAT},
    "thinking": {
        "max_tokens": 256,
        "thinking": {"type": "enabled", "budget_tokens": 128},
        "messages": CHAT,
    },
}
EMBEDDINGS: Bodies = {
    "texts": {"input": ["a red fox", "a green frog"]},
    "embeddings that are stored": {"prompt_embeds": _STORED},
}
SCORES: Bodies = {"pairs": {"text_1": "a fox", "text_2": ["an animal", "a stone"]}}
RERANK: Bodies = {"documents": {"query": "a fox", "documents": ["a stone", "an animal"]}}
