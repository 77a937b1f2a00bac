"""Stored prompts over HTTP: uploaded once, used by reference, found by their owner alone."""

import asyncio
import base64
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest
import torch

from inlay.store import PromptStore, StoreSettings
from inlay.tensors import write
from inlay.transport.local import LocalTransport
from tests.live import SECRET, Fleet
from tests.payloads import TEXT, embeds_of, error, post

GREEDY = {"max_tokens": 12, "temperature": 0, "return_token_ids": True}
JSON = {"content-type": "application/json"}
RAW = {"content-type": "application/octet-stream"}


def stored(rows: torch.Tensor | np.ndarray[Any, Any], **more: Any) -> bytes:
    """A safetensors file."""
    return write(np.asarray(rows), "safetensors", **more)


def upload(url: str, data: bytes, query: str = "", **headers: str) -> httpx.Response:
    return httpx.post(
        f"{url}/v1/prompt_embeds{query}", content=data, headers={**RAW, **headers}, timeout=180
    )


def uploaded(url: str, data: bytes, **headers: str) -> str:
    response = upload(url, data, **headers)
    assert response.status_code == 200, response.text
    id_: str = response.json()["id"]
    return id_


def complete(url: str, headers: dict[str, str] | None = None, **fields: Any) -> list[int]:
    response = httpx.post(
        url + "/v1/completions", json={**GREEDY, **fields}, headers=headers, timeout=180
    )
    assert response.status_code == 200, response.text
    ids: list[int] = response.json()["choices"][0]["token_ids"]
    return ids


def random_rows(seed: int, rows: int = 24, hidden: int = 48) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).standard_normal((rows, hidden)).astype(np.float32) * 0.5


@pytest.fixture(scope="module")
def sentence(llama: Fleet) -> bytes:
    return stored(embeds_of(llama))


class Clock:
    """A clock that the test advances."""

    def __init__(self) -> None:
        self.now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


def memory_store(**options: Any) -> PromptStore:
    return PromptStore(SECRET, **{"memory_bytes": 1 << 26, "ttl": 100.0, **options})


@pytest.fixture(scope="module")
def keyed_url(llama: Fleet) -> str:
    return llama.serve(enable_prompt_embeds=True, api_key=["one", "two"])


def key(name: str) -> dict[str, str]:
    return {"authorization": f"Bearer {name}"}


def test_an_upload_is_described_and_the_same_bytes_again_are_the_same_prompt(
    url: str, sentence: bytes
) -> None:
    first = upload(url, sentence).json()
    assert first == {
        "id": first["id"],
        "object": "prompt_embeds",
        "num_prompts": 1,
        "num_tokens": first["num_tokens"],
        "hidden_size": 48,
        "dtype": "float32",
        "bytes": first["num_tokens"] * 48 * 4,
        "expires_at": first["expires_at"],
        "pinned": False,
    }
    assert first["id"].startswith("pe-")
    assert upload(url, sentence).json()["id"] == first["id"]
    assert httpx.get(f"{url}/v1/prompt_embeds/{first['id']}").json()["id"] == first["id"]


def test_json_and_raw_bytes_are_the_same_upload(url: str, sentence: bytes) -> None:
    response = post(url, "/v1/prompt_embeds", {"data": base64.b64encode(sentence).decode()})
    assert response.json()["id"] == uploaded(url, sentence)


def test_a_batch_is_stored_whole_and_gives_as_many_choices(url: str) -> None:
    batch = np.stack([random_rows(1), random_rows(2)])
    described = upload(url, stored(batch)).json()
    assert (described["num_prompts"], described["num_tokens"]) == (2, 24)
    body = {**GREEDY, "prompt_embeds": {"ref": described["id"]}}
    choices = post(url, "/v1/completions", body).json()["choices"]
    apart = [
        complete(url, prompt_embeds=base64.b64encode(stored(rows)).decode())
        for rows in (batch[0], batch[1])
    ]
    assert [choice["token_ids"] for choice in choices] == apart
    parts = [{"type": "prompt_embeds", "ref": described["id"]}]
    assert "a batch of 2" in error(post(url, "/v1/completions", {"prompt": parts}))["message"]


def test_by_reference_decodes_as_by_value_wherever_it_may_stand(
    url: str, llama: Fleet, sentence: bytes
) -> None:
    id_, data = uploaded(url, sentence), base64.b64encode(sentence).decode()
    text = complete(url, prompt=TEXT)
    assert complete(url, prompt_embeds=data) == text
    for _ in range(2):
        assert complete(url, prompt_embeds={"ref": id_}) == text
        assert complete(url, prompt=[{"type": "prompt_embeds", "ref": id_}]) == text
    both = post(
        url, "/v1/completions", {**GREEDY, "prompt_embeds": [{"ref": id_}, data, {"ref": id_}]}
    ).json()
    assert [choice["token_ids"] for choice in both["choices"]] == [text] * 3

    def chat(part: dict[str, str]) -> list[int]:
        content = [{"type": "text", "text": "Say: "}, {"type": "prompt_embeds", **part}]
        body = {**GREEDY, "messages": [{"role": "user", "content": content}]}
        ids: list[int] = post(url, "/v1/chat/completions", body).json()["choices"][0]["token_ids"]
        return ids

    assert chat({"ref": id_}) == chat({"data": data})


@pytest.mark.parametrize("rows", [400, 24])
def test_the_rows_of_a_reference_are_placed_in_shared_memory_once(llama: Fleet, rows: int) -> None:
    url = llama.serve(enable_prompt_embeds=True)
    id_ = uploaded(url, stored(random_rows(rows, rows)))
    channel = llama.plane._links[0]._carrier
    assert isinstance(channel, LocalTransport)
    arena = channel.arena
    placed: list[int] = []
    view = arena._view

    class Counting:
        """The arena's memory, and how many bytes are written to it."""

        def __setitem__(self, where: slice, data: memoryview) -> None:
            placed.append(len(data))
            view[where] = data

        def __getitem__(self, where: slice) -> memoryview:
            return view[where]

    arena._view = Counting()  # type: ignore[assignment]
    try:
        first = complete(url, prompt_embeds={"ref": id_})
        after_first = sum(placed)
        answers = [complete(url, prompt_embeds={"ref": id_}) for _ in range(3)]
        mixed = [{"type": "text", "text": TEXT}, {"type": "prompt_embeds", "ref": id_}]
        complete(url, prompt=mixed)
    finally:
        arena._view = view
    assert answers == [first] * 3
    # Small rows travel beside the message and not through the arena.
    assert after_first == (rows * 48 * 4 if rows == 400 else 0)
    assert sum(placed) == after_first


def test_a_reference_of_another_dtype_is_cast_once_and_decodes_as_by_value(url: str) -> None:
    rows = torch.from_numpy(random_rows(3)).to(torch.bfloat16)
    data = write(rows.view(torch.int16).numpy().view(ml_dtypes.bfloat16), "safetensors")
    id_ = uploaded(url, data)
    want = complete(url, prompt_embeds=base64.b64encode(data).decode())
    assert [complete(url, prompt_embeds={"ref": id_}) for _ in range(2)] == [want] * 2


def test_what_is_missing_foreign_or_deleted_cannot_be_told_apart(
    keyed_url: str, sentence: bytes
) -> None:
    mine = uploaded(keyed_url, sentence, **key("one"))
    unknown = "pe-" + "a" * 32
    httpx.delete(f"{keyed_url}/v1/prompt_embeds/{mine}", headers=key("two"))

    def answers(id_: str) -> list[tuple[int, Any]]:
        path = f"{keyed_url}/v1/prompt_embeds/{id_}"
        chat = {"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "ref": id_}]}]}
        two = key("two")
        responses = [
            httpx.get(path, headers=two),
            httpx.delete(path, headers=two),
            httpx.post(path + "/pin", headers=two),
            post(keyed_url, "/v1/completions", {"prompt_embeds": {"ref": id_}}, **two),
            post(keyed_url, "/v1/chat/completions", chat, **two),
        ]
        return [(response.status_code, response.text.replace(id_, "ID")) for response in responses]

    assert answers(mine) == answers(unknown)
    assert {status for status, _ in answers(mine)} == {404}
    assert all("not found" in body for _, body in answers(mine))
    assert complete(keyed_url, key("one"), prompt_embeds={"ref": mine})
    assert uploaded(keyed_url, sentence, **key("two")) != mine


def test_a_deleted_prompt_is_gone(url: str) -> None:
    data = stored(random_rows(5))
    id_ = uploaded(url, data)
    gone = httpx.delete(f"{url}/v1/prompt_embeds/{id_}")
    assert gone.json() == {"id": id_, "object": "prompt_embeds", "deleted": True}
    assert httpx.delete(f"{url}/v1/prompt_embeds/{id_}").status_code == 404
    refused = post(url, "/v1/completions", {"prompt_embeds": [{"ref": id_}]})
    assert refused.status_code == 404
    assert error(refused)["param"] == "prompt_embeds[0]"
    assert uploaded(url, data) == id_


def test_what_nobody_uses_expires_and_what_is_used_or_pinned_does_not(llama: Fleet) -> None:
    clock = Clock()
    url = llama.serve(enable_prompt_embeds=True, store=memory_store(clock=clock))
    idle, used, pinned = (uploaded(url, stored(random_rows(seed))) for seed in (6, 7, 8))
    answer = post(url, f"/v1/prompt_embeds/{pinned}/pin", {}).json()
    assert (answer["pinned"], answer["expires_at"]) == (True, None)
    clock.now += 60
    assert complete(url, prompt_embeds={"ref": used})
    described = httpx.get(f"{url}/v1/prompt_embeds/{used}").json()
    assert described["expires_at"] == 1_000_160
    clock.now += 60
    assert [
        httpx.get(f"{url}/v1/prompt_embeds/{id_}").status_code for id_ in (idle, used, pinned)
    ] == [
        404,
        200,
        200,
    ]
    answer = post(url, f"/v1/prompt_embeds/{pinned}/pin", {"pinned": False}).json()
    assert (answer["pinned"], answer["expires_at"]) == (False, 1_000_220)
    clock.now += 101
    assert [httpx.get(f"{url}/v1/prompt_embeds/{id_}").status_code for id_ in (used, pinned)] == [
        404,
        404,
    ]


@pytest.mark.parametrize(
    ("body", "phrase"),
    [(b'{"a":' + b"[" * 20_000 + b"]" * 20_000 + b"}", "nested too deeply"), (b'{"a":' + b"[" * 200_000, "100000"),
     (b'{"pinned": "yes"}', "expected `bool`"), (b'{"pinned":', "not valid JSON")],
)  # fmt: skip
def test_a_pin_that_is_none_is_refused_and_pins_nothing(url: str, body: bytes, phrase: str) -> None:
    id_ = uploaded(url, stored(random_rows(10)))
    refused = httpx.post(f"{url}/v1/prompt_embeds/{id_}/pin", content=body, headers=JSON)
    assert refused.status_code == 400
    assert phrase in error(refused)["message"]
    assert not httpx.get(f"{url}/v1/prompt_embeds/{id_}").json()["pinned"]


def test_a_pin_needs_no_body(url: str) -> None:
    id_ = uploaded(url, stored(random_rows(11)))
    assert httpx.post(f"{url}/v1/prompt_embeds/{id_}/pin").json()["pinned"]


def test_an_upload_for_a_model_is_checked_at_once_and_else_at_its_first_use(url: str) -> None:
    narrow = stored(random_rows(9, hidden=32))
    refused = upload(url, narrow, "?model=tiny")
    assert refused.status_code == 400
    assert "size of tensor must match" in error(refused)["message"]
    assert upload(url, narrow, "?model=nobody").status_code == 404
    id_ = uploaded(url, narrow)
    for _ in range(2):
        later = post(url, "/v1/completions", {"prompt_embeds": {"ref": id_}})
        assert later.status_code == 400
        assert "size of tensor must match" in error(later)["message"]
    good = upload(url, stored(random_rows(10)), "?model=org%2Ftiny")
    assert complete(url, prompt_embeds={"ref": good.json()["id"]})


@pytest.mark.parametrize(
    ("data", "phrase"),
    [
        (b"", "at least 100 bytes"),
        (b"x" * 99, "at least 100 bytes"),
        (b"x" * 200, "must be a torch.Tensor"),
        (stored(np.zeros((2, 2, 2, 48), np.float32)), "must be a torch.Tensor"),
        (b"x" * 4001, "exceeds maximum size of 4000 bytes"),
    ],
)
def test_what_is_no_tensor_is_not_stored(llama: Fleet, data: bytes, phrase: str) -> None:
    url = llama.serve(enable_prompt_embeds=True, max_prompt_embeds_bytes=4000)
    refused = upload(url, data)
    assert refused.status_code == 400
    assert phrase in error(refused)["message"]

    def pieces() -> Iterator[bytes]:
        yield from (data[at : at + 1000] for at in range(0, len(data), 1000))

    assert error(httpx.post(url + "/v1/prompt_embeds", content=pieces(), headers=RAW)) == error(
        refused
    )


def test_other_media_and_a_server_without_embeddings_are_refused(url: str, plain_url: str) -> None:
    other = httpx.post(
        url + "/v1/prompt_embeds", content=b"a", headers={"content-type": "text/plain"}
    )
    assert other.status_code == 415
    assert "send application/octet-stream or application/json" in error(other)["message"]
    refused = upload(plain_url, stored(random_rows(1)))
    assert refused.status_code == 400
    assert "--enable-prompt-embeds" in error(refused)["message"]
    assert post(url, "/v1/prompt_embeds", {"data": "%"}).status_code == 400
    assert post(url, "/v1/prompt_embeds", {}).status_code == 400
    assert httpx.get(url + "/v1/prompt_embeds").status_code == 405


def test_a_store_that_is_full_says_so(llama: Fleet) -> None:
    url = llama.serve(
        enable_prompt_embeds=True,
        store=memory_store(memory_bytes=40_000, max_per_tenant_bytes=20_000),
    )
    too_large = upload(url, stored(random_rows(1, rows=300)))
    assert too_large.status_code == 413
    for seed in (1, 2):
        last = upload(url, stored(random_rows(seed, rows=40)))
    assert last.status_code == 429
    assert "retry-after" in last.headers


def test_many_uploads_of_the_same_bytes_at_once_are_one(llama: Fleet) -> None:
    store = memory_store()
    url = llama.serve(enable_prompt_embeds=True, store=store)
    data = stored(random_rows(11, rows=400))
    with ThreadPoolExecutor(8) as pool:
        ids = set(pool.map(lambda _: uploaded(url, data), range(16)))
        (id_,) = ids
        answers = list(
            pool.map(lambda _: tuple(complete(url, prompt_embeds={"ref": id_})), range(8))
        )
    assert len(set(answers)) == 1
    assert store.stats().count == 1


def test_references_outlive_a_server_with_a_directory(
    llama: Fleet, tmp_path: Path, sentence: bytes
) -> None:
    def settings() -> StoreSettings:
        return StoreSettings(prompt_store_dir=tmp_path / "store", state_dir=tmp_path / "state")

    async def closed(url: str) -> None:
        llama.apps[url].server.close()

    secret = settings().secret()
    url = llama.serve(enable_prompt_embeds=True, store=settings().open(secret))
    id_ = uploaded(url, sentence)
    pinned = uploaded(url, stored(random_rows(12)))
    post(url, f"/v1/prompt_embeds/{pinned}/pin", {})
    want = complete(url, prompt_embeds={"ref": id_})
    llama.run(closed(url))
    assert settings().secret().fingerprint == secret.fingerprint
    again = llama.serve(enable_prompt_embeds=True, store=settings().open(settings().secret()))
    assert complete(again, prompt_embeds={"ref": id_}) == want
    assert httpx.get(f"{again}/v1/prompt_embeds/{pinned}").json()["pinned"] is True
    httpx.delete(f"{again}/v1/prompt_embeds/{id_}")
    assert len(list((tmp_path / "store").glob("*.prompt"))) == 1


def test_the_store_is_counted(llama: Fleet, sentence: bytes) -> None:
    url = llama.serve(enable_prompt_embeds=True)
    id_ = uploaded(url, sentence)
    for _ in range(3):
        complete(url, prompt_embeds={"ref": id_})
    post(url, "/v1/completions", {"prompt_embeds": {"ref": "pe-none"}})
    lines = httpx.get(url + "/metrics").text.splitlines()
    values = {
        line.split()[0]: float(line.split()[1])
        for line in lines
        if line.startswith("inlay:prompt_store")
    }
    assert values["inlay:prompt_store_entries"] == 1
    assert values["inlay:prompt_store_hits_total"] == 2
    assert values["inlay:prompt_store_misses_total"] == 1
    assert values['inlay:prompt_store_bytes{tier="memory"}'] > len(sentence)


async def test_touching_a_reference_needs_no_pass_over_its_bytes(llama: Fleet) -> None:
    """A reference that was used before costs the event loop one look-up."""
    store = memory_store()
    url = llama.serve(enable_prompt_embeds=True, store=store)
    id_ = await asyncio.to_thread(uploaded, url, stored(random_rows(13, rows=200)))
    await asyncio.to_thread(complete, url, prompt_embeds={"ref": id_})
    before = store.stats()
    await asyncio.to_thread(complete, url, prompt_embeds={"ref": id_})
    after = store.stats()
    assert (after.hits, after.loads) == (before.hits + 1, before.loads)
    assert after.memory_bytes == before.memory_bytes
