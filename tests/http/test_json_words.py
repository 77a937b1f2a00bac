"""What is said of JSON that cannot be read: also of an escape that the parser takes for its end."""

import itertools
import json
from typing import Any

import httpx
import msgspec
import pytest

from inlay.base.errors import InvalidRequestError
from inlay.http.parsed_request import parse_body
from inlay.tensors import ReadLimits

PIECES = ["\\ud83d", "\\ude00", "\\\\", "\\n", "x", "é"]
TEXTS = [
    "".join(pieces) for count in range(4) for pieces in itertools.product(PIECES, repeat=count)
]
CUT = "Input data was truncated"


def said(body: bytes) -> str | None:
    """What is said of a body; None where it is read."""
    decoder = msgspec.json.Decoder(Any)
    try:
        parse_body(bytearray(body), decoder, lambda _: (), limits=ReadLimits)
    except InvalidRequestError as error:
        return error.message
    return None


@pytest.mark.parametrize("form", ['{"a":"%s"}', '"%s"', '{"a": ["%s"] }\n'])
def test_a_whole_body_is_not_said_to_be_cut(form: str) -> None:
    for text in TEXTS:
        body = form % text
        try:
            json.dumps(json.loads(body), ensure_ascii=False).encode()
        except UnicodeEncodeError:
            message = said(body.encode()) or ""
            assert "surrogate" in message, body
            assert CUT not in message, body
        else:
            assert said(body.encode()) is None, body


def test_a_body_that_is_cut_is_said_to_be() -> None:
    for text in TEXTS:
        body = f'{{"a":"{text}"}}'.encode()
        if said(body) is None:
            for end in range(1, len(body)):
                assert CUT in (said(body[:end]) or ""), body[:end]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (rb'{"input":"\ud800"}', r"not valid JSON: its \ud800 is a surrogate without its pair"),
        (rb'{"input":"\uDBffx"}', r"its \uDBff is a surrogate without its pair"),
        (rb'{"input":"\ud800\u"}', r"its \ud800 is a surrogate without its pair"),
        (rb'{"input":"\ud"}', r"it has a \u without four hexadecimal digits"),
        (rb'"\ud8"', r"it has a \u without four hexadecimal digits"),
        (rb'{"input":"\ud800', CUT),
        (rb'{"input":"\ud800\udc0', CUT),
        (rb'{"input":"\ud8', CUT),
        (rb'{"input":"\\ud800"', CUT),
        (rb'{"input":"' + b"A" * 5000 + rb'\ud800"}', "surrogate without its pair"),
    ],
)
def test_what_is_wrong_is_said(url: str, body: bytes, words: str) -> None:
    kind = {"content-type": "application/json"}
    for path in ("embeddings", "responses"):
        answer = httpx.post(f"{url}/v1/{path}", content=body, headers=kind)
        assert (answer.status_code, words in answer.json()["error"]["message"]) == (400, True), (
            answer.text
        )
