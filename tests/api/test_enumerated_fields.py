"""Fields with a few allowed values, given values of every other JSON type.

Each is refused by name, whatever its type; null is as absent where the field may be.
"""

import copy
import re
from typing import Any

import pytest

from tests.payloads import error, post

USER = {"role": "user", "content": "count"}
PIXEL = "data:image/gif;base64,R0lGODlhAQABAAAAACwAAAAAAQABAAACAkQBADs="
FUNCTION = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
COMPLETIONS, CHAT, RESPONSES = "/v1/completions", "/v1/chat/completions", "/v1/responses"
MESSAGES, EMBEDDINGS, ENCODE = "/v1/messages", "/v1/embeddings", "/v1/encode"
IMAGES, SPEECH, TOKENIZE = "/v1/images/generations", "/v1/audio/speech", "/tokenize"
CHATTED = {"messages": [USER], "max_tokens": 1}


def parts(*found: object) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(found)}], "max_tokens": 1}


def items(*found: object) -> dict[str, Any]:
    return {"input": [{"role": "user", "content": list(found)}], "max_output_tokens": 16}


def image(**more: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": PIXEL, **more}}


Place = tuple[str | int, ...]
CONTENT: Place = ("messages", 0, "content", 0)
CASES: list[tuple[str, dict[str, Any], Place]] = [
    (CHAT, parts(image()), (*CONTENT, "image_url", "detail")),
    (CHAT, parts({**image(), "image_url": PIXEL}), (*CONTENT, "detail")),
    (CHAT, parts({"type": "text", "text": "a"}), (*CONTENT, "type")),
    (
        CHAT,
        parts({"type": "input_audio", "input_audio": {"data": "AAAA", "format": "wav"}}),
        (*CONTENT, "input_audio", "format"),
    ),
    (CHAT, CHATTED, ("messages", 0, "role")),
    (CHAT, CHATTED, ("response_format", "type")),
    (CHAT, {**CHATTED, "tools": [FUNCTION]}, ("tool_choice",)),
    (CHAT, {**CHATTED, "tools": [FUNCTION]}, ("tool_choice", "type")),
    (CHAT, {**CHATTED, "tools": [FUNCTION]}, ("tools", 0, "type")),
    (CHAT, CHATTED, ("modalities",)),
    (CHAT, CHATTED, ("modalities", 0)),
    (CHAT, CHATTED, ("output_format",)),
    (CHAT, CHATTED, ("truncation_side",)),
    (CHAT, {**CHATTED, "audio": {"voice": "a"}, "modalities": ["text", "audio"]}, ("audio", "format")),
    (RESPONSES, items({"type": "input_image", "image_url": PIXEL}), ("input", 0, "content", 0, "detail")),
    (RESPONSES, items({"type": "input_text", "text": "a"}), ("input", 0, "content", 0, "type")),
    (RESPONSES, items("a"), ("input", 0, "role")),
    (RESPONSES, items("a"), ("input", 0, "type")),
    (RESPONSES, {"input": "a"}, ("text", "format", "type")),
    (RESPONSES, {"input": "a"}, ("truncation",)),
    (RESPONSES, {"input": "a"}, ("include", 0)),
    (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f"}]}, ("tools", 0, "type")),
    (RESPONSES, {"input": "a", "tools": [{"type": "function", "name": "f"}]}, ("tool_choice",)),
    (
        RESPONSES,
        {"input": "a", "tools": [{"type": "function", "name": "f"}]},
        ("tool_choice", "type"),
    ),
    (
        RESPONSES,
        {
            "input": "a",
            "tools": [{"type": "function", "name": "f"}],
            "tool_choice": {"type": "allowed_tools", "tools": [{"type": "function", "name": "f"}]},
        },
        ("tool_choice", "mode"),
    ),
    (MESSAGES, CHATTED, ("messages", 0, "role")),
    (MESSAGES, parts({"type": "text", "text": "a"}), (*CONTENT, "type")),
    (MESSAGES, parts({"type": "image", "source": {"data": "AAAA"}}), (*CONTENT, "source", "type")),
    (MESSAGES, CHATTED, ("thinking", "type")),
    (MESSAGES, {**CHATTED, "thinking": {"type": "adaptive"}}, ("thinking", "display")),
    (MESSAGES, CHATTED, ("output_config", "format", "type")),
    (
        MESSAGES,
        {**CHATTED, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        ("tool_choice", "type"),
    ),
    (
        MESSAGES,
        {**CHATTED, "tools": [{"name": "f", "input_schema": {"type": "object"}}]},
        ("tools", 0, "type"),
    ),
    (COMPLETIONS, {"prompt": [{"type": "text", "text": "a"}], "max_tokens": 1}, ("prompt", 0, "type")),
    (COMPLETIONS, {"prompt": [image()], "max_tokens": 1}, ("prompt", 0, "image_url", "detail")),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1}, ("truncation_side",)),
    (COMPLETIONS, {"prompt": "a", "max_tokens": 1}, ("response_format", "type")),
    (EMBEDDINGS, {"input": "a"}, ("encoding_format",)),
    (EMBEDDINGS, {"input": "a"}, ("embed_dtype",)),
    (EMBEDDINGS, {"input": "a"}, ("endianness",)),
    (EMBEDDINGS, {"messages": [{"role": "user", "content": [image()]}]}, (*CONTENT, "image_url", "detail")),
    ("/pooling", {"input": "a"}, ("task",)),
    (ENCODE, {"input": [image()]}, ("input", 0, "type")),
    (ENCODE, {"input": [image()]}, ("input", 0, "image_url", "detail")),
    (ENCODE, {"input": PIXEL}, ("encoding_format",)),
    (IMAGES, {"prompt": "a"}, ("output_format",)),
    (IMAGES, {"prompt": "a"}, ("response_format",)),
    (SPEECH, {"input": "a"}, ("response_format",)),
    (SPEECH, {"input": "a"}, ("stream_format",)),
    (TOKENIZE, {"messages": [USER]}, ("messages", 0, "role")),
    (TOKENIZE, parts({"type": "text", "text": "a"}), (*CONTENT, "type")),
]  # fmt: skip
"""Route, a body, and the place in it of an enumerated field."""

VALUES: tuple[Any, ...] = ([], {}, [[]], {"a": {}}, ["a"], 5, -1.5, True, "", "no such value", None)


def placed(body: dict[str, Any], place: Place, value: object) -> dict[str, Any]:
    """`body` with `value` at `place`; objects on the way are made."""
    found = copy.deepcopy(body)
    within: Any = found
    for key in place[:-1]:
        if isinstance(within, dict) and not isinstance(within.get(str(key)), dict | list):
            within[key] = [None] if isinstance(place[place.index(key) + 1], int) else {}
        within = within[key]
    within[place[-1]] = value
    return found


OF_THE_MODEL = {(CHAT, "format"), ("/pooling", "task")}
"""Fields whose texts are compared with what the model does; this one refuses the request before."""
NAMES = re.compile(r"must be|must have|expected `|allowed: |supported: |may hold|a part is")
"""Words before what a field may be."""


@pytest.mark.extensions("stages")
@pytest.mark.parametrize(
    ("path", "body", "place"),
    CASES,
    ids=[f"{row[0]}-{'.'.join(map(str, row[2]))}" for row in CASES],
)
def test_a_value_of_any_other_type_is_refused_by_name(
    url: str, path: str, body: dict[str, Any], place: Place
) -> None:
    name = next(key for key in reversed(place) if isinstance(key, str))
    for value in VALUES:
        response = post(url, path, placed(body, place, value))
        assert response.status_code in (200, 400), (value, response.text)
        if value is not None and not (isinstance(value, str) and (path, name) in OF_THE_MODEL):
            message = response.json()["error"]["message"]
            assert response.status_code == 400, (value, message)
            assert name in message, (value, message)
            assert NAMES.search(message), (value, message)


def test_the_values_that_a_field_may_have_are_named(url: str) -> None:
    for path, name, allowed in (
        (COMPLETIONS, "truncation_side", "left, right"),
        (CHAT, "output_format", "png, jpeg, webp"),
        (EMBEDDINGS, "encoding_format", "float, base64, bytes, bytes_only, safetensors"),
    ):
        body = {"prompt": "a", "input": "a", "messages": [USER], name: "no such value"}
        found = error(post(url, path, body))
        assert (found["param"], found["message"].partition("; allowed: ")[2]) == (name, allowed)


@pytest.mark.parametrize("detail", ["auto", "low", "high", "original"])
def test_every_detail_of_openais_is_taken(url: str, detail: str) -> None:
    found = error(post(url, CHAT, parts(image(detail=detail))))
    assert "takes no images" in found["message"]


@pytest.mark.parametrize(
    "part",
    [
        {"type": "image_url", "image_url": None},
        {"type": "image_url", "image_url": {}},
        {"type": "image_url", "image_url": {"url": None, "detail": "low"}},
        {"image_url": None},
        {"type": "image_embeds", "image_embeds": None},
        {"type": "image_embeds", "image_embeds": {}},
        {"type": "audio_url", "audio_url": {}},
        {"type": "input_audio", "input_audio": None},
        {"type": "input_audio", "input_audio": {"data": None, "format": "wav"}},
        {"type": "audio_embeds", "audio_embeds": None},
        {"type": "video_url", "video_url": {"url": ""}},
    ],
    ids=str,
)
def test_media_that_are_named_by_their_uuid_alone_are_refused_as_such(
    url: str, part: dict[str, Any]
) -> None:
    found = error(post(url, CHAT, parts({**part, "uuid": "mine"})))
    assert re.search("not kept by (their|its) uuid", found["message"]), found
    assert found["param"].startswith("messages[0].content[0].")
