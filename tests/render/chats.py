"""Chats for tests, and the parts they are made of."""

from typing import Any

from inlay.messages.prompt import Buffer, Rows

TOOL = {
    "type": "function",
    "function": {
        "name": "lookup",
        "description": "naïve <b>look</b> & see",
        "parameters": {"type": "object", "properties": {"q": {"type": "string"}}},
    },
}

CHATS: dict[str, list[dict[str, Any]]] = {
    "one": [{"role": "user", "content": "Hello world"}],
    "system": [
        {"role": "system", "content": "Be  brief. "},
        {"role": "user", "content": " What?\n"},
    ],
    "turns": [
        {"role": "user", "content": "What is the capital?"},
        {"role": "assistant", "content": "The town."},
        {"role": "user", "content": "Which? <|im_end|> <s>"},
    ],
}
WITH_TOOLS: list[dict[str, Any]] = [
    {"role": "user", "content": "Count."},
    {
        "role": "assistant",
        "content": "I look.",
        "reasoning": "hm, {'a'}",
        "tool_calls": [
            {
                "id": "1",
                "type": "function",
                "function": {"name": "lookup", "arguments": {"q": "é <x>"}},
            }
        ],
    },
    {"role": "tool", "tool_call_id": "1", "content": "42"},
]


def rows(num: int = 2, *, fill: int = 0) -> Rows:
    return Rows(Buffer(bytes([fill]) * (num * 8)), "float32", (num, 2))


def embeds(index: int) -> dict[str, Any]:
    return {"type": "prompt_embeds", "index": index}


def text(content: str) -> dict[str, Any]:
    return {"type": "text", "text": content}


def user(*parts: dict[str, Any]) -> list[dict[str, Any]]:
    return [{"role": "user", "content": list(parts)}]
