"""Fields and routes of vLLM's newest release, and fields of OpenAI's own types.

Each is served, refused with a reason, or changes nothing; each route is served, or named among the
differences.
"""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest
from openai.types import completion_create_params as completions
from openai.types import embedding_create_params as embeddings
from openai.types import image_generate_params as images
from openai.types.audio import speech_create_params as speech
from openai.types.chat import completion_create_params as chats
from openai.types.responses import response_create_params as responses

from inlay.api.app import routes
from inlay.api.openai.schema.completions import CompletionRequest
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.api.openai.schema.responses import ResponsesRequest
from inlay.api.schema.chat import ChatRequest
from inlay.api.schema.unserved import reason_for, unserved
from inlay_stages.api.schema.images import ImagesRequest
from inlay_stages.api.schema.speech import SpeechRequest
from tests.embedding_models import tiny_embedding
from tests.live import fleet
from tests.payloads import error, post
from tests.vllm_requests import PAIRS, known

DOCS = Path("docs/from-vllm.md").read_text(encoding="utf-8")

CHANGE_NOTHING = {
    *("metadata", "prediction", "safety_identifier", "service_tier", "store", "verbosity"),
    *("access_programs", "prompt_cache_options", "prompt_cache_retention"),
}
"""Fields that OpenAI's clients send, and of which no answer here depends."""

SDK: list[tuple[Any, type[msgspec.Struct]]] = [
    (completions.CompletionCreateParamsBase, CompletionRequest),
    (chats.CompletionCreateParamsBase, ChatRequest),
    (responses.ResponseCreateParamsBase, ResponsesRequest),
    (embeddings.EmbeddingCreateParams, EmbeddingRequest),
    (images.ImageGenerateParamsBase, ImagesRequest),
    (speech.SpeechCreateParams, SpeechRequest),
]


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_no_field_of_vllms_newest_release_is_ignored(
    theirs: str, ours: type[msgspec.Struct]
) -> None:
    fields = known()["types"][theirs]
    assert sorted(set(fields) - set(ours.__struct_fields__)) == []
    for name in set(unserved(ours)) & set(fields):
        assert reason_for(ours, name).allows(fields[name]), name


@pytest.mark.parametrize(("theirs", "ours"), SDK)
def test_no_field_of_openais_that_would_change_an_answer_is_ignored(
    theirs: Any, ours: type[msgspec.Struct]
) -> None:
    fields = set(theirs.__annotations__)
    assert sorted(fields - set(ours.__struct_fields__) - CHANGE_NOTHING) == []


@pytest.mark.extensions
def test_each_route_of_vllms_newest_release_is_served_or_a_difference() -> None:
    served = {re.sub(r"{\w+}", "{}", operation.path) for operation, _ in routes()}
    differences = DOCS.split("## Differences from vLLM")[1].split("\n## ")[0]
    assert f"vLLM {known()['version'].rpartition('.')[0]}" in differences
    missing = [path for path in known()["routes"] if re.sub(r"{\w+}", "{}", path) not in served]
    assert missing
    assert [path for path in missing if f"`{path}`" not in differences] == []
    rows = [row.split("|")[1] for row in differences.splitlines() if row.startswith("| `/")]
    named = {path for row in rows for path in re.findall(r"`(/[^`]+)`", row)}
    # Those of a second table are served, and answer otherwise.
    assert [path for path in known()["routes"] if path in named - set(missing)] == [
        "/health", "/load", "/ping", "/pooling", "/server_info", "/tokenizer_info",
    ]  # fmt: skip


@pytest.mark.extensions("stages")
@pytest.mark.parametrize(
    ("path", "name", "value", "why"),
    [
        ("/v1/images/generations", "width", 64, "say size"),
        ("/v1/images/generations", "height", 64, "say size"),
        ("/v1/images/generations", "image", "data:,", "none is changed"),
        ("/v1/images/generations", "background", "transparent", "say it in the prompt"),
        ("/v1/responses", "background", True, "ask with stream"),
        ("/v1/completions", "inputs_embeds", [[0.5]], "say prompt_embeds"),
        ("/v1/chat/completions", "input_embeds", [[0.5]], "a part of a message"),
    ],
)
def test_what_would_change_the_answer_is_refused_by_name(
    url: str, path: str, name: str, value: object, why: str
) -> None:
    chat = [{"role": "user", "content": "a"}]
    asked: dict[str, dict[str, object]] = {
        "/v1/responses": {"input": "a"},
        "/v1/chat/completions": {"messages": chat},
    }
    body = {**asked.get(path, {"prompt": "a"}), name: value}
    found = error(post(url, path, body))
    assert found["param"] == name
    assert found["message"].startswith(f"{name} is not supported: ")
    assert why in found["message"]


def test_an_embedding_is_not_of_a_prompt_beside_its_input() -> None:
    with fleet(tiny_embedding("bert"), task="embed") as running:
        url = running.serve()
        assert post(url, "/v1/embeddings", {"input": "a"}).status_code == 200
        for name in ("prompt", "task", "inputs"):
            found = error(post(url, "/v1/embeddings", {"input": "a", name: "b"}))
            assert found["param"] == name
