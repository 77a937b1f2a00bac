"""JSON that would hold the interpreter is refused before it is parsed, and all other JSON is left alone."""

import gc
import json
import time
from collections.abc import Callable, Iterator
from typing import Any

import httpx
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import BodyTooLargeError, InvalidRequestError
from inlay.http.bodies import base64_extractor as lift
from inlay.http.bodies import structure
from inlay.http.bodies.accounting import EmbedsLimits
from inlay.http.bodies.structure import (
    MAX_CONTAINERS,
    MAX_ESCAPES,
    MAX_KEYS,
    MAX_SPACES,
    MAX_STRINGS,
    check_structure,
    count,
)
from inlay.http.settings import FrontendSettings
from tests.live import Fleet


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


def num_strings(value: Any) -> Iterator[int]:
    """Ones, as many as there are strings and keys in `value`."""
    if isinstance(value, str):
        yield 1
    elif isinstance(value, list | dict):
        inner = value if isinstance(value, list) else [*value, *value.values()]
        for item in inner:
            yield from num_strings(item)


@given(value=JSON, size=st.integers(1, 9))
def test_strings_are_told_apart_wherever_a_body_is_cut(value: Any, size: int) -> None:
    text = json.dumps(value).encode()
    inside = escaped = False
    num_bounds = 0
    counts = dict.fromkeys(b'[],"', 0)
    for start in range(0, len(text), size):
        block = np.frombuffer(text[start : start + size], np.uint8)
        bounds, escaped = structure._bounds(block, escaped)
        for character in counts:
            counts[character] += structure._outside(bounds, inside, block == character)
        num_bounds += len(bounds)
        inside ^= len(bounds) % 2 == 1
    outside = [each for each, within in zip(text, in_strings(text), strict=True) if not within]
    assert counts == {character: outside.count(character) for character in counts}
    assert (inside, escaped) == (False, False)
    assert num_bounds == 2 * sum(num_strings(value))


MANY: dict[str, tuple[int, Callable[[int], str]]] = {
    "JSON objects and arrays": (MAX_CONTAINERS - 1, lambda number: json.dumps([{} for _ in range(number)])),
    "keys in its JSON objects": (MAX_KEYS, lambda number: json.dumps(dict.fromkeys(range(number)))),
    "JSON strings": (MAX_STRINGS, lambda number: json.dumps(["a"] * number)),
    "bytes of white space": (MAX_SPACES, lambda number: "[" + " " * number + '" "]'),
    "backslashes": (MAX_ESCAPES, lambda number: json.dumps("é" * number)),
}  # fmt: skip


@pytest.mark.parametrize("what", MANY)
def test_as_many_as_allowed_are_read_and_one_more_is_refused_by_name(what: str) -> None:
    most, make = MANY[what]
    for text in (make(most), make(most + 1)):
        body = text.encode()
        counted = count(body)
        if text == make(most):
            check_structure(body, counted=counted)
            check_structure(body)
            continue
        for known in (counted, None):
            with pytest.raises(InvalidRequestError, match=f"the body has more than [0-9]+ {what}"):
                check_structure(body, counted=known)


def test_what_stands_in_strings_does_not_count() -> None:
    text = json.dumps({"a": "[{:" * MAX_CONTAINERS + " " * MAX_SPACES + '"' * MAX_STRINGS}).encode()
    counted = count(text)
    assert not counted.within()
    check_structure(text, counted=counted)


def test_texts_of_one_request_count_together() -> None:
    half = json.dumps(dict.fromkeys(range(MAX_KEYS // 2))).encode()
    check_structure(half, half)
    with pytest.raises(InvalidRequestError, match=f"the arguments has more than {MAX_KEYS} keys"):
        check_structure(half, half, b'{"a":1}', where="the arguments")


def test_counting_gives_way_again_and_again(monkeypatch: pytest.MonkeyPatch) -> None:
    turns = []
    monkeypatch.setattr(structure, "yield_gil", lambda: turns.append(1))
    text = b'"' + b"a" * (5 * structure._BLOCK)
    count(text)
    check_structure(text)
    assert len(turns) == 12


KEYS = {str(number): 1 for number in range(MAX_KEYS + 1)}
SAID = {"role": "user", "content": "a"}


def called(arguments: str) -> dict[str, Any]:
    """A message that calls a tool."""
    function = {"name": "f", "arguments": arguments}
    return {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "a", "type": "function", "function": function}],
    }


CROWDED: dict[str, tuple[str, dict[str, Any]]] = {
    "logit_bias": ("/v1/completions", {"prompt": "a", "logit_bias": KEYS}),
    "metadata": ("/v1/chat/completions", {"messages": [SAID], "metadata": KEYS}),
    "metadata of a response": ("/v1/responses", {"input": "a", "metadata": KEYS}),
    "chat_template_kwargs": ("/v1/chat/completions", {"messages": [SAID], "chat_template_kwargs": KEYS}),
    "a message": ("/v1/chat/completions", {"messages": [{**SAID, **KEYS}]}),
    "a tool call": ("/v1/chat/completions", {"messages": [called(json.dumps(KEYS))]}),
    "many tool calls": (
        "/v1/chat/completions",
        {"messages": [called(json.dumps(dict(list(KEYS.items())[:10_001]))) for _ in range(5)]},
    ),
    "the input of a tool": ("/v1/messages", {"max_tokens": 1, "messages": [{"role": "assistant", "content": [
        {"type": "tool_use", "id": "a", "name": "f", "input": KEYS}]}]}),
    "a tool call to tokenize": ("/tokenize", {"messages": [called(json.dumps(KEYS))]}),
    "texts to embed": ("/v1/embeddings", {"input": ["a"] * (MAX_STRINGS + 1)}),
}  # fmt: skip


@pytest.mark.parametrize("crowded", CROWDED)
def test_objects_with_many_keys_are_refused_before_they_are_made(
    plain_url: str, crowded: str
) -> None:
    path, body = CROWDED[crowded]
    answer = httpx.post(plain_url + path, json=body, timeout=60)
    assert answer.status_code == 400
    assert "which no request needs" in answer.json()["error"]["message"]


LIMIT = 100_000
TEXTS: dict[str, bytes] = {
    "white space": b" " * LIMIT + b'{"prompt":"a","max_tokens":1}',
    "text": json.dumps({"prompt": "a b " * (LIMIT // 4), "max_tokens": 1}).encode(),
    "base64 that is no tensor": json.dumps({"prompt": "a", "user": "abcd" * (LIMIT // 4)}).encode(),
    "base64 that stops being it": json.dumps({"prompt": "a", "user": "abcd" * (LIMIT // 4) + "-"}).encode(),
    "a truncated prompt": json.dumps(
        {"prompt": "a b " * (LIMIT // 4), "max_tokens": 1, "truncate_prompt_tokens": 3}
    ).encode(),
}  # fmt: skip


@pytest.mark.parametrize("chunked", [False, True])
@pytest.mark.parametrize("text", TEXTS)
def test_json_beyond_its_limit_is_refused_before_it_is_parsed(
    llama: Fleet, text: str, chunked: bool
) -> None:
    url = llama.serve(max_json_bytes=LIMIT)
    body = TEXTS[text]
    content = (
        (body[start : start + 4096] for start in range(0, len(body), 4096)) if chunked else body
    )
    answer = httpx.post(
        url + "/v1/completions",
        content=content,
        headers={"content-type": "application/json"},
        timeout=60,
    )
    assert answer.status_code == 413
    assert f"over the limit of {LIMIT} bytes" in answer.json()["error"]["message"]


def test_base64_that_is_no_tensor_data_counts_as_text_and_the_error_says_so(llama: Fleet) -> None:
    url = llama.serve(max_json_bytes=LIMIT)
    body = {"prompt": "A" * 2 * LIMIT, "max_tokens": 1}
    answer = httpx.post(url + "/v1/completions", json=body, timeout=60)
    assert answer.status_code == 413
    message = answer.json()["error"]["message"]
    size = int(message.split("the body has ")[1].split(" bytes")[0])
    assert 2 * LIMIT <= size <= 2 * LIMIT + 100
    assert f"over the limit of {LIMIT} bytes" in message
    assert "other base64 is text" in message


@pytest.mark.parametrize(
    ("fields", "says"),
    [({"max_tokens": 1}, "--enable-prompt-embeds"), ({"max_tokens": "one"}, "max_tokens")],
)
def test_why_large_embeddings_are_refused_is_said_and_not_that_they_are_long(
    llama: Fleet, fields: dict[str, Any], says: str
) -> None:
    url = llama.serve(max_json_bytes=LIMIT, enable_prompt_embeds=False)
    answer = httpx.post(url + "/v1/completions", json={"prompt_embeds": "abcd" * LIMIT, **fields})
    assert answer.status_code == 400
    assert says in answer.json()["error"]["message"]


def test_text_is_refused_as_it_arrives_and_base64_does_not_count() -> None:
    limits = EmbedsLimits(FrontendSettings(max_json_bytes=4 << 20), list)
    taken = lift.Base64Extractor(check=limits.check_json)
    for _ in range(10):
        taken.feed(b'{"prompt_embeds":"' + b"A" * (4 << 20) + b'"}')
    for text in (b" " * (1 << 20), b'"' + b"AAAA" * (1 << 18) + b'-"'):
        taken = lift.Base64Extractor(check=limits.check_json)
        for _ in range(3):
            taken.feed(text)
        with pytest.raises(BodyTooLargeError):
            taken.feed(4 * text)


def test_what_a_body_refused_as_it_arrives_took_is_free_without_a_collection(llama: Fleet) -> None:
    url = llama.serve(max_json_bytes=LIMIT)
    gc.collect()
    gc.disable()
    try:
        answer = httpx.post(
            url + "/v1/completions", json={"prompt": "a b " * 1_000_000}, timeout=60
        )
        assert answer.status_code == 413
        deadline = time.monotonic() + 30
        # The answer is there a moment before its server has done with it.
        while any(type(found) is lift.Base64Extractor for found in gc.get_objects()):
            assert time.monotonic() < deadline, "the body is kept until a collection finds it"
            time.sleep(0.1)
    finally:
        gc.enable()
