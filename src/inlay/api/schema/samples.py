"""Values that examples of several fields and requests share."""

from typing import Any

QUESTION = "What is the capital of France?"
CHAT: list[dict[str, Any]] = [{"role": "user", "content": QUESTION}]
ROWS = "<base64 of a tensor file>"
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
FUNCTION = {"name": "weather", "description": "The weather of a city.", "parameters": SCHEMA}
