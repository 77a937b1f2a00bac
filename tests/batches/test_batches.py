"""Files and batches over HTTP, with OpenAI's client and a real engine."""

import json
import time
from collections.abc import Callable
from io import BytesIO
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types import Batch

from inlay.store.settings import BatchSettings
from tests.live import Fleet
from tests.payloads import embeds_of, saved

SEED = 7
ENDED = ("completed", "failed", "expired", "cancelled")


def client_of(url: str, key: str = "k") -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key=key, max_retries=0)


@pytest.fixture(scope="module")
def url(llama: Fleet) -> str:
    return llama.serve(enable_prompt_embeds=True, batches=BatchSettings(batch_store="memory"))


@pytest.fixture
def client(url: str) -> openai.OpenAI:
    return client_of(url)


def line(custom_id: str, endpoint: str, body: dict[str, Any]) -> bytes:
    fields = {"custom_id": custom_id, "method": "POST", "url": endpoint, "body": body}
    return json.dumps(fields).encode() + b"\n"


def upload(client: openai.OpenAI, data: bytes) -> str:
    return client.files.create(file=("a.jsonl", BytesIO(data)), purpose="batch").id


def begin(client: openai.OpenAI, data: bytes, endpoint: Any, **more: Any) -> Batch:
    return client.batches.create(
        input_file_id=upload(client, data), endpoint=endpoint, completion_window="24h", **more
    )


def ended(client: openai.OpenAI, batch: Batch, within: float = 90) -> Batch:
    deadline = time.monotonic() + within
    while batch.status not in ENDED:
        assert time.monotonic() < deadline, batch
        time.sleep(0.1)
        batch = client.batches.retrieve(batch.id)
    return batch


def rows(client: openai.OpenAI, id_: str | None) -> dict[str, dict[str, Any]]:
    if id_ is None:
        return {}
    found = [json.loads(each) for each in client.files.content(id_).read().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def same(answer: dict[str, Any]) -> dict[str, Any]:
    """An answer without what differs each time."""
    usage = {**answer["usage"], "prompt_tokens_details": None}
    return {**answer, "id": "", "created": 0, "usage": usage}


COMPLETION = {"model": "tiny", "prompt": "one two", "max_tokens": 6, "temperature": 1.0}


def test_a_batch_answers_each_line_as_the_route_does(
    client: openai.OpenAI, url: str, llama: Fleet
) -> None:
    embeds = saved(embeds_of(llama))
    stored = httpx.post(f"{url}/v1/prompt_embeds", json={"data": embeds}).json()["id"]
    bodies: dict[str, dict[str, Any]] = {
        "text": {**COMPLETION, "seed": SEED},
        "rows": {"model": "tiny", "prompt_embeds": embeds, "max_tokens": 6, "temperature": 0},
        "ref": {"model": "tiny", "prompt_embeds": {"ref": stored}, "max_tokens": 6, "seed": 3},
        "gone": {"model": "tiny", "prompt_embeds": {"ref": "pe-" + "a" * 32}, "max_tokens": 6},
        "long": {"model": "tiny", "prompt": [1] * 100_000, "max_tokens": 6},
    }
    data = b"".join(line(id_, "/v1/completions", body) for id_, body in bodies.items())
    batch = begin(client, data, "/v1/completions", metadata={"a": "b"})
    assert batch.status in ("validating", "in_progress")
    assert batch.metadata == {"a": "b"}
    batch = ended(client, batch)
    assert (batch.status, batch.errors) == ("completed", None)
    counts = batch.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (5, 3, 2)
    output, error = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
    assert (set(output), set(error)) == ({"text", "rows", "ref"}, {"gone", "long"})
    for id_, found in {**output, **error}.items():
        answer = httpx.post(f"{url}/v1/completions", json=bodies[id_])
        assert found["error"] is None
        assert found["response"]["status_code"] == answer.status_code
        if answer.status_code == 200:
            assert same(found["response"]["body"]) == same(answer.json())
        else:
            assert found["response"]["body"] == answer.json()
    assert batch.usage is not None
    made = [each["response"]["body"]["usage"] for each in output.values()]
    assert batch.usage.output_tokens == sum(each["completion_tokens"] for each in made)
    assert batch.usage.input_tokens == sum(each["prompt_tokens"] for each in made)


def test_chats_and_responses_are_answered_too(client: openai.OpenAI) -> None:
    chat = {"messages": [{"role": "user", "content": "one"}], "max_tokens": 3}
    first = begin(client, line("a", "/v1/chat/completions", chat), "/v1/chat/completions")
    asked = {"input": "one", "max_output_tokens": 3}
    second = begin(client, line("a", "/v1/responses", asked), "/v1/responses")
    for batch in (first, second):
        found = rows(client, ended(client, batch).output_file_id)
        assert found["a"]["response"]["status_code"] == 200


def test_a_flex_request_is_background_work_and_its_answer_says_so(client: openai.OpenAI) -> None:
    said: Any = [{"role": "user", "content": "one"}]
    chat = client.chat.completions.create(
        model="tiny", messages=said, max_tokens=2, service_tier="flex"
    )
    assert chat.service_tier == "flex"
    response = client.responses.create(
        model="tiny", input="one", max_output_tokens=2, service_tier="flex"
    )
    assert response.service_tier == "flex"
    usual = client.responses.create(model="tiny", input="one", max_output_tokens=2)
    assert usual.service_tier == "default"


def test_a_line_without_a_seed_has_one_of_its_own(client: openai.OpenAI) -> None:
    body = {**COMPLETION, "seed": None}
    data = b"".join(line(f"a{index}", "/v1/completions", body) for index in range(4))
    output = rows(client, ended(client, begin(client, data, "/v1/completions")).output_file_id)
    texts = {each["response"]["body"]["choices"][0]["text"] for each in output.values()}
    assert len(texts) > 1


def test_bad_lines_fail_a_batch_with_their_numbers_before_any_runs(client: openai.OpenAI) -> None:
    good = line("a", "/v1/completions", COMPLETION)
    streamed = line("b", "/v1/completions", {**COMPLETION, "stream": True})
    wrong = line("c", "/v1/completions", {**COMPLETION, "max_tokens": "many"})
    batch = ended(client, begin(client, good + streamed + wrong + b"{\n", "/v1/completions"))
    assert batch.status == "failed"
    assert batch.errors is not None
    assert [(each.line, each.param) for each in batch.errors.data or ()] == [
        (2, "body.stream"), (3, "body.max_tokens"), (4, None),
    ]  # fmt: skip
    assert (batch.output_file_id, batch.error_file_id) == (None, None)
    batch = ended(
        client,
        begin(
            client, line("a", "/v1/completions", {"model": "no", "prompt": "a"}), "/v1/completions"
        ),
    )
    assert batch.errors is not None
    assert [each.code for each in batch.errors.data or ()] == ["model_not_found"]
    batch = ended(
        client, begin(client, line("a", "/v1/embeddings", {"input": "a"}), "/v1/embeddings")
    )
    assert batch.errors is not None
    assert "generates text" in str((batch.errors.data or [])[0].message)


def test_requests_that_cannot_be_are_refused_by_name(client: openai.OpenAI, url: str) -> None:
    file = upload(client, line("a", "/v1/completions", COMPLETION))
    base = {"input_file_id": file, "endpoint": "/v1/completions", "completion_window": "24h"}

    def refusal(**fields: Any) -> tuple[int, str]:
        answer = httpx.post(f"{url}/v1/batches", json={**base, **fields})
        error = answer.json()["error"]
        return answer.status_code, error["param"]

    assert refusal(input_file_id="file-none") == (404, "file_id")
    assert refusal(input_file_id="../x") == (404, "file_id")
    assert refusal(endpoint="/v1/images/generations") == (400, "endpoint")
    assert refusal(completion_window="1m") == (400, "completion_window")
    assert refusal(completion_window="721h") == (400, "completion_window")
    assert refusal(metadata={"a": "x" * 513}) == (400, "metadata")
    assert refusal(output_format="npy") == (400, "output_format")
    answer = httpx.post(f"{url}/v1/files", data={"purpose": "fine-tune"}, files={"file": b"x"})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "purpose")
    kept = {"purpose": "batch", "expires_after[anchor]": "created_at"}
    for seconds in ("", "3599", "000003600" + "9" * 10, "000003600" + "9" * 5000):
        answer = httpx.post(
            f"{url}/v1/files",
            data={**kept, "expires_after[seconds]": seconds},
            files={"file": b"x"},
        )
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "expires_after")
    answer = httpx.post(f"{url}/v1/files", json={"purpose": "batch"})
    assert answer.status_code == 415
    with pytest.raises(openai.NotFoundError):
        client.batches.cancel("batch_none")


def test_files_are_listed_a_page_at_a_time_and_deleted(llama: Fleet) -> None:
    url = llama.serve(batches=BatchSettings(batch_store="memory"))
    client = client_of(url)
    ids = [upload(client, b"%d" % index) for index in range(5)]
    assert client.files.retrieve(ids[0]).status == "processed"
    assert client.files.wait_for_processing(ids[0]).bytes == 1
    assert client.files.content(ids[3]).read() == b"3"
    listed = [each.id for each in client.files.list(limit=2, order="asc")]
    assert sorted(listed) == sorted(ids)
    assert [each.id for each in client.files.list(limit=2)] == listed[::-1]
    assert list(client.files.list(purpose="user_data")) == []
    assert client.files.delete(ids[0]).deleted
    with pytest.raises(openai.NotFoundError, match="does not exist"):
        client.files.retrieve(ids[0])
    assert len(list(client.files.list())) == 4
    assert httpx.get(f"{url}/v1/files", params={"limit": "0"}).status_code == 400
    assert httpx.get(f"{url}/v1/files", params={"after": "file-x"}).status_code == 400


def test_an_ended_batch_is_cancelled_as_it_is_and_all_are_listed(client: openai.OpenAI) -> None:
    batch = ended(
        client, begin(client, line("a", "/v1/completions", COMPLETION), "/v1/completions")
    )
    assert client.batches.cancel(batch.id).status == "completed"
    found = [each.id for each in client.batches.list(limit=1)]
    assert len(set(found)) == len(found)
    assert batch.id in found


def test_a_running_batch_is_cancelled_at_once_and_its_file_may_be_deleted(
    client: openai.OpenAI,
) -> None:
    slow = {**COMPLETION, "max_tokens": 200, "ignore_eos": True}
    data = b"".join(line(f"a{index}", "/v1/completions", slow) for index in range(600))
    batch = begin(client, data, "/v1/completions")
    assert client.files.delete(batch.input_file_id).deleted
    while client.batches.retrieve(batch.id).status == "validating":
        time.sleep(0.02)
    assert client.batches.cancel(batch.id).status == "cancelling"
    batch = ended(client, batch)
    assert batch.status == "cancelled"
    output, error = rows(client, batch.output_file_id), rows(client, batch.error_file_id)
    assert len(output) + len(error) == 600
    assert "batch_cancelled" in {(each["error"] or {}).get("code") for each in error.values()}


def test_files_and_batches_of_others_are_as_absent_as_none(llama: Fleet, tmp_path: Path) -> None:
    keys = tmp_path / "keys.json"

    def write(*names: str) -> None:
        keys.write_text(json.dumps([{"name": name, "key": f"sk-{name}"} for name in names]))
        keys.chmod(0o600)

    write("ann", "bob")
    url = llama.serve(api_key_file=keys, batches=BatchSettings(batch_store=str(tmp_path / "store")))
    ann, bob = client_of(url, "sk-ann"), client_of(url, "sk-bob")
    slow = {**COMPLETION, "max_tokens": 200, "ignore_eos": True}
    data = b"".join(line(f"a{index}", "/v1/completions", slow) for index in range(400))
    batch = begin(ann, data, "/v1/completions")
    asks: tuple[Callable[[], object], ...] = (
        lambda: bob.files.retrieve(batch.input_file_id),
        lambda: bob.files.content(batch.input_file_id),
        lambda: bob.files.delete(batch.input_file_id),
        lambda: bob.batches.retrieve(batch.id),
        lambda: bob.batches.cancel(batch.id),
        lambda: bob.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
        ),
    )
    for ask in asks:
        with pytest.raises(openai.NotFoundError):
            ask()
    assert [*bob.files.list(), *bob.batches.list()] == []
    # A key that is removed while its batch runs ends it; it finds its files when it is back.
    write("bob")
    llama.run(llama.apps[url].server.keys.files.reload())
    deadline = time.monotonic() + 60
    part = llama.apps[url].server.parts["batches"]
    owner = part.owner("ann")
    while llama.run(part.get(owner, batch.id)).status != "cancelled":
        assert time.monotonic() < deadline
        time.sleep(0.1)
    write("ann", "bob")
    llama.run(llama.apps[url].server.keys.files.reload())
    batch = ann.batches.retrieve(batch.id)
    assert len(rows(ann, batch.output_file_id)) + len(rows(ann, batch.error_file_id)) == 400


def test_uploads_and_batches_have_bounds_that_are_named(llama: Fleet) -> None:
    settings = BatchSettings(
        batch_store="memory", max_file_bytes=2000, files_tenant_bytes=3000, max_batches_per_tenant=1,
        max_batch_lines=2,
    )  # fmt: skip
    url = llama.serve(batches=settings)
    client = client_of(url)
    with pytest.raises(openai.APIStatusError, match=r"2000 bytes \(--max-file-bytes\)") as caught:
        upload(client, bytes(2001))
    assert caught.value.status_code == 413
    upload(client, bytes(1800))
    with pytest.raises(openai.RateLimitError, match="--files-tenant-bytes"):
        upload(client, bytes(1300))
    data = line("a", "/v1/completions", {**COMPLETION, "max_tokens": 400, "ignore_eos": True})
    batch = begin(client, data, "/v1/completions")
    with pytest.raises(openai.RateLimitError, match="--max-batches-per-tenant"):
        client.batches.create(
            input_file_id=batch.input_file_id, endpoint="/v1/completions", completion_window="24h"
        )
    client.batches.cancel(batch.id)


def test_without_a_store_the_routes_are_not_there(plain_url: str) -> None:
    for method, path in (
        ("GET", "/v1/files"), ("POST", "/v1/files"), ("GET", "/v1/batches"), ("POST", "/v1/batches"),
        ("GET", "/v1/files/file-a/content"),
    ):  # fmt: skip
        answer = httpx.request(method, plain_url + path)
        assert answer.status_code == 404, path
        assert answer.json()["error"]["code"] == "not_found"
        assert "--batch-store" in answer.json()["error"]["message"]
