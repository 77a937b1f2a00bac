"""Parsing never takes more memory than was reserved for it, and not far less."""

import json
import tracemalloc
from typing import Any

import msgspec
import pytest

from inlay.api.openai.schema.completions import CompletionRequest
from inlay.api.schema.chat import ChatRequest
from inlay.http.bodies.accounting import parsed_size
from inlay.http.bodies.structure import count

N = 20_000


def items(item: str) -> str:
    return ",".join([item] * N)


SHAPES: dict[str, tuple[type, str]] = {
    "text": (CompletionRequest, '{"prompt": "' + "hello world, this is text. " * N + '"}'),
    "wide text": (CompletionRequest, '{"prompt": "' + "a" * 10 * N + '\N{WAVING HAND SIGN}"}'),
    "escapes": (CompletionRequest, '{"prompt": "' + "a" * 10 * N + '\\ud83d\\ude00"}'),
    "only escapes": (CompletionRequest, '{"prompt": "' + "\\u00e9" * N + '"}'),
    "ids": (CompletionRequest, json.dumps({"prompt": list(range(10_000, 10_000 + N))}, separators=(",", ":"))),
    "small ids": (CompletionRequest, '{"prompt":[' + items("1") + "]}"),
    "texts": (CompletionRequest, '{"prompt":[' + items('"a"') + "]}"),
    "lists of ids": (CompletionRequest, '{"prompt":[' + items("[1]") + "]}"),
    "parts": (CompletionRequest, '{"prompt":[' + items('{"type":"text","text":""}') + "]}"),
    "empty messages": (ChatRequest, '{"messages":[' + items("{}") + "]}"),
    "messages": (ChatRequest, '{"messages":[' + items('{"role":"user","content":"hi"}') + "]}"),
    "odd messages": (ChatRequest, '{"messages":[' + items('{"a":[1.5]}') + "]}"),
    "numbers": (ChatRequest, '{"messages":[{"a":[' + items("0.1") + "]}]}"),
    "empty lists": (ChatRequest, '{"messages":[{"a":[' + items("[]") + "]}]}"),
    "many keys": (ChatRequest, '{"messages":[{' + ",".join(f'"{i}":1' for i in range(N)) + "}]}"),
    "nested": (ChatRequest, '{"messages":[{"a":' + '{"a":' * 300 + "1" + "}" * 300 + "}" + ",{}" * 3000 + "]}"),
    "ignored": (CompletionRequest, '{"prompt":"a","unknown":[' + items("{}") + "]}"),
    "bias": (CompletionRequest, '{"logit_bias":{' + ",".join(f'"{i}":1' for i in range(N)) + "}}"),
    "small": (ChatRequest, '{"messages":[' + ",".join(['{"a":[1.5]}'] * 100) + "]}"),
}  # fmt: skip


@pytest.mark.parametrize("shape", SHAPES)
def test_what_is_held_is_at_least_what_parsing_takes(shape: str) -> None:
    kind, text = SHAPES[shape]
    decoder: msgspec.json.Decoder[Any] = msgspec.json.Decoder(kind)
    body = text.encode()
    tracemalloc.start()
    try:
        decoder.decode(body)
        _, peak = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert parsed_size(count(body)) >= peak
