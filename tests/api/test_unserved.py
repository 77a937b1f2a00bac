"""The table of fields that are refused, and the types that declare them."""

import re
from pathlib import Path

import msgspec
import pytest

from inlay.api.anthropic.schema import MessagesInput
from inlay.api.fields import check_unserved
from inlay.api.openai.schema.cohere import EmbedRequest
from inlay.api.openai.schema.completions import CompletionRequest
from inlay.api.openai.schema.embeddings import (
    ClassificationRequest,
    EmbeddingRequest,
    PoolingRequest,
)
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.api.openai.schema.scoring import RerankRequest, ScoreRequest
from inlay.api.openai.schema.tokenize import TokenizeRequest
from inlay.api.schema.chat import ChatRequest
from inlay.api.schema.unserved import UNSERVED, reason_for, unserved
from inlay.base.errors import InvalidRequestError
from inlay_stages.api.schema.images import ImagesRequest
from inlay_stages.api.schema.speech import SpeechRequest

TYPES = (
    MessagesInput,
    ChatRequest,
    ClassificationRequest,
    CompletionRequest,
    EmbeddingRequest,
    ImagesRequest,
    PoolingRequest,
    RerankRequest,
    ResponsesRequest,
    ScoreRequest,
    SpeechRequest,
    TokenizeRequest,
    EmbedRequest,
)
FIELDS = [(kind, name) for kind in TYPES for name in unserved(kind)]


def with_field(kind: type[msgspec.Struct], name: str, value: object) -> msgspec.Struct:
    needed: dict[type, dict[str, object]] = {
        ChatRequest: {"messages": []},
        MessagesInput: {"messages": []},
        ImagesRequest: {"prompt": "a"},
        SpeechRequest: {"input": "a"},
        RerankRequest: {"query": "a", "documents": ["b"]},
        EmbedRequest: {"texts": ["a"]},
    }
    return msgspec.convert({**needed.get(kind, {}), name: value}, kind)


def test_each_field_that_is_declared_so_has_a_reason_and_each_reason_a_field() -> None:
    used = [reason_for(kind, name) for kind, name in FIELDS]
    assert [name for name, reason in UNSERVED.items() if reason not in used] == []


def test_each_of_them_stands_in_the_page_of_the_api() -> None:
    page = Path("docs/api-reference.md").read_text().split("## Fields that are refused")[1]
    assert set(re.findall(r"`(\w+)`", page)) >= {name for _, name in FIELDS}


@pytest.mark.parametrize(("kind", "name"), FIELDS)
def test_a_field_that_is_not_served_is_refused_by_name_and_null_is_not(
    kind: type[msgspec.Struct], name: str
) -> None:
    check_unserved(with_field(kind, name, None))
    reason = reason_for(kind, name)
    for value in reason.absent:
        check_unserved(with_field(kind, name, value))
    with pytest.raises(InvalidRequestError, match=reason.text[:20]) as caught:
        check_unserved(with_field(kind, name, {"a": 7}))
    assert caught.value.param == name
    assert caught.value.message.startswith(f"{name} is not supported: ")
    assert caught.value.message.endswith("; got an object with 'a'")


def test_a_number_is_no_boolean_where_the_one_asks_for_nothing() -> None:
    check_unserved(ChatRequest(messages=[], length_penalty=1))
    for name, value in (
        ("length_penalty", True),
        ("return_prompt_text", 0),
        ("stream_interval", True),
    ):
        with pytest.raises(InvalidRequestError, match=name):
            check_unserved(with_field(ChatRequest, name, value))
