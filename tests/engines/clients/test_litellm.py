"""litellm, unchanged, as both of its providers for a server with OpenAI's API."""

import json
import time
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest

from tests.serving import Served

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

ASK = [{"role": "user", "content": "count the lanterns"}]


@pytest.fixture(scope="module")
def litellm() -> Any:
    import litellm

    litellm.telemetry = False
    return litellm


@pytest.fixture(params=["openai", "hosted_vllm"])
def provider(request: pytest.FixtureRequest, server: Served) -> tuple[str, dict[str, Any]]:
    return request.param, {"api_base": server.v1, "api_key": "k"}


def test_chats_completions_and_responses_are_answered(
    litellm: Any, provider: tuple[str, dict[str, Any]]
) -> None:
    name, where = provider
    asked = {"model": f"{name}/m", "messages": ASK, "max_tokens": 8, "temperature": 0, **where}
    whole = litellm.completion(**asked).choices[0].message.content
    assert whole
    pieces = litellm.completion(**asked, stream=True)
    assert "".join(piece.choices[0].delta.content or "" for piece in pieces) == whole
    given = {"model": f"{name}/m", "input": ASK, "max_output_tokens": 8, "temperature": 0, **where}
    first = litellm.responses(**given)
    assert first.output[0].content[0].text == whole
    second = litellm.responses(**{**given, "input": "go on"}, previous_response_id=first.id)
    assert second.previous_response_id


def test_files_and_batches_are_the_servers_own(
    litellm: Any, provider: tuple[str, dict[str, Any]]
) -> None:
    name, where = provider
    body = {"model": "m", "messages": ASK, "max_tokens": 8, "temperature": 0}
    line = {"custom_id": "a", "method": "POST", "url": "/v1/chat/completions", "body": body}
    file = litellm.create_file(
        file=("a.jsonl", BytesIO(json.dumps(line).encode())),
        purpose="batch",
        custom_llm_provider=name,
        **where,
    )
    batch = litellm.create_batch(
        completion_window="24h",
        endpoint="/v1/chat/completions",
        input_file_id=file.id,
        custom_llm_provider=name,
        **where,
    )
    deadline = time.monotonic() + 120
    while batch.status != "completed":
        assert time.monotonic() < deadline, batch
        time.sleep(0.2)
        batch = litellm.retrieve_batch(batch_id=batch.id, custom_llm_provider=name, **where)
    content = litellm.file_content(
        file_id=batch.output_file_id, custom_llm_provider=name, **where
    ).content
    assert json.loads(content)["custom_id"] == "a"
    listed = litellm.list_batches(custom_llm_provider=name, **where)
    assert batch.id in [one.id for one in listed.data]
    assert litellm.file_delete(file_id=file.id, custom_llm_provider=name, **where).deleted


@pytest.mark.timeout(600)  # with the start of two servers
@pytest.mark.parametrize("name", ["openai", "hosted_vllm"])
def test_embeddings_and_transcriptions_are_answered(
    litellm: Any, name: str, embedder: Served, sound: tuple[Served, Path]
) -> None:
    texts = ["a lantern", "a harbour"]
    found = litellm.embedding(
        model=f"{name}/m", input=texts, api_base=embedder.v1, api_key="k", encoding_format="float"
    )
    assert len(found.data) == 2
    assert found.data[0]["embedding"] != found.data[1]["embedding"]
    hearing, file = sound
    with file.open("rb") as reading:
        heard = litellm.transcription(
            model=f"{name}/m", file=reading, api_base=hearing.v1, api_key="k"
        )
    assert heard.text
