"""What parsing takes is never more than what was held for it, and not absurdly less."""

import json
import tracemalloc
from typing import Any

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import InvalidRequestError
from inlay.frontend.bodies import intake
from inlay.frontend.bodies.intake import MAX_CONTAINERS, check_containers, parsed_size
from inlay.protocol.openai.chat import ChatRequest
from inlay.protocol.openai.completions import CompletionRequest

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
    assert parsed_size(body) >= peak


def in_strings(text: bytes) -> list[bool]:
    """Which characters are in strings, their opening quotes included, one at a time."""
    found: list[bool] = []
    inside = escaped = False
    for character in text:
        if escaped:
            escaped = False
        elif inside and character == ord("\\"):
            escaped = True
        elif character == ord('"'):
            inside = not inside
        found.append(inside)
    return found


JSON = st.recursive(
    st.text('[{"\\a]}', max_size=8), lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text('"\\{', max_size=3), inner)
)  # fmt: skip


@given(value=JSON, size=st.integers(1, 9))
def test_strings_are_told_apart_wherever_a_body_is_cut(value: Any, size: int) -> None:
    text = json.dumps(value).encode()
    found: list[bool] = []
    inside = escaped = False
    for start in range(0, len(text), size):
        block = np.frombuffer(text[start : start + size], np.uint8)
        strings, inside, escaped = intake._strings(block, inside, escaped)
        found += strings.tolist()
    assert found == in_strings(text)
    assert (inside, escaped) == (False, False)


def test_as_many_containers_as_allowed_are_read_and_brackets_in_strings_do_not_count() -> None:
    text = '"' + '[{\\"' * MAX_CONTAINERS + '"'
    inner = ",".join(["{}", "[]"] * (MAX_CONTAINERS // 2 - 1))
    check_containers(f'{{"a":{text},"b":[{inner}]}}'.encode())
    for more in (",{}", ",[]"):
        with pytest.raises(InvalidRequestError, match="more than 100000 JSON objects and arrays"):
            check_containers(f'{{"a":{text},"b":[{inner}{more}]}}'.encode())
