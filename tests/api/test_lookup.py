"""Embeddings that the server makes of texts, and what it tells of rows; off unless switched on."""

from typing import Any

import httpx
import ml_dtypes
import numpy as np
import pytest

from inlay.client import PromptEmbedder
from inlay.tensors import write
from tests.live import Fleet

TEXT = "three words here"
OCTETS = {"content-type": "application/octet-stream"}


@pytest.fixture(scope="module")
def looking(llama: Fleet) -> str:
    return llama.serve(enable_prompt_embeds=True, enable_embedding_lookup=True)


def post(url: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
    headers = {"authorization": f"Bearer {key}"} if key else {}
    return httpx.post(url, json={"model": "tiny", **body}, headers=headers, timeout=180)


def encode(url: str, body: dict[str, Any], key: str | None = None) -> httpx.Response:
    return post(f"{url}/v1/prompt_embeds/encode", body, key)


def rows(url: str, ref: str, nearest: int = 0, key: str | None = None) -> httpx.Response:
    return post(f"{url}/v1/prompt_embeds/{ref}/rows", {"nearest": nearest}, key)


def test_encoded_texts_answer_as_the_texts_do(looking: str) -> None:
    messages = [{"role": "user", "content": TEXT}]
    ref = encode(looking, {"messages": messages}).json()["id"]
    common = {"max_tokens": 8, "temperature": 0, "return_token_ids": True}
    chat = post(f"{looking}/v1/chat/completions", {"messages": messages, **common}).json()
    body = {"prompt_embeds": {"ref": ref}, **common}
    completion = post(f"{looking}/v1/completions", body).json()
    assert completion["choices"][0]["token_ids"] == chat["choices"][0]["token_ids"]
    assert completion["usage"]["prompt_tokens"] == chat["usage"]["prompt_tokens"]


def test_rows_of_a_text_are_those_of_the_table_and_their_tokens_are_named(
    looking: str, llama: Fleet
) -> None:
    stored = encode(looking, {"prompt": TEXT}).json()
    found = rows(looking, stored["id"], 2).json()
    embedder = PromptEmbedder.from_pretrained(llama.path)
    ids = embedder.renderer.encode(TEXT, add_special_tokens=True)
    own = embedder.table.rows(ids).astype(np.float32)
    assert found["num_tokens"] == stored["num_tokens"] == len(ids)
    assert [row["nearest"][0]["id"] for row in found["rows"]] == list(ids)
    assert all(row["nearest"][0]["exact"] for row in found["rows"])
    assert [row["norm"] for row in found["rows"]] == pytest.approx(np.linalg.norm(own, axis=1))
    assert found["table_median_norm"] > 0


def test_noise_is_of_the_length_that_was_asked_for_and_the_same_again(
    looking: str, llama: Fleet
) -> None:
    text = " ".join([TEXT] * 8)
    clean = encode(looking, {"prompt": text}).json()
    one = encode(looking, {"ref": clean["id"], "noise": 1.0, "seed": 3}).json()
    assert one["id"] == encode(looking, {"prompt": text, "noise": 1.0, "seed": 3}).json()["id"]
    assert one["id"] != encode(looking, {"prompt": text, "noise": 1.0, "seed": 4}).json()["id"]
    lengths = [rows(looking, stored["id"]).json()["median_norm"] for stored in (clean, one)]
    # Independent directions: lengths add as in a right angle.
    assert lengths[1] / lengths[0] == pytest.approx(2**0.5, rel=0.25)


@pytest.mark.parametrize(
    ("body", "said"),
    [
        ({}, "exactly one"),
        ({"prompt": "a", "ref": "pe-x"}, "exactly one"),
        ({"prompt": "a", "noise": -0.1}, "noise must be 0 to 64"),
        ({"prompt": "a", "noise": 64.5}, "noise must be 0 to 64"),
        ({"prompt": "a", "seed": -1}, "seed must be"),
        ({"prompt": "a " * 4000}, "maximum context length"),
        ({"messages": [{"role": "user", "content": [{"type": "prompt_embeds", "ref": "x"}]}]},
         "text alone"),
    ],
)  # fmt: skip
def test_what_cannot_be_encoded_is_refused(looking: str, body: dict[str, Any], said: str) -> None:
    answer = encode(looking, body)
    assert answer.status_code == 400
    assert said in answer.json()["error"]["message"]


def test_at_most_8_tokens_are_named_for_a_row_and_128_rows_are_searched(
    looking: str, llama: Fleet
) -> None:
    (card,) = llama.router.models()
    many = np.ones((200, card.hidden_size), ml_dtypes.bfloat16)
    ref = httpx.post(
        f"{looking}/v1/prompt_embeds", content=write(many, "safetensors"), headers=OCTETS
    ).json()["id"]
    found = rows(looking, ref, 1).json()
    assert (found["num_tokens"], len(found["rows"])) == (200, 128)
    assert len(rows(looking, ref).json()["rows"]) == 200
    assert rows(looking, ref, 9).status_code == 400
    assert rows(looking, "pe-none", 1).status_code == 404


def test_embeddings_are_not_turned_into_text_unless_switched_on(url: str, llama: Fleet) -> None:
    (card,) = llama.router.models()
    ref = httpx.post(
        f"{url}/v1/prompt_embeds",
        content=write(np.ones((2, card.hidden_size), np.float32), "safetensors"),
        headers=OCTETS,
    ).json()["id"]
    lengths = rows(url, ref).json()
    assert [row["norm"] for row in lengths["rows"]] == pytest.approx([card.hidden_size**0.5] * 2)
    assert lengths["table_median_norm"] is None
    for answer in (rows(url, ref, 1), encode(url, {"prompt": TEXT})):
        assert answer.status_code == 403
        assert "--enable-embedding-lookup" in answer.json()["error"]["message"]
    capabilities = httpx.get(f"{url}/v1/models/tiny").json()["capabilities"]
    assert "embedding_lookup" not in capabilities


def test_nobody_is_told_what_another_tenant_uploaded(llama: Fleet) -> None:
    shared = llama.serve(
        enable_prompt_embeds=True, enable_embedding_lookup=True, api_key=["one", "two"]
    )
    ref = encode(shared, {"prompt": TEXT}, "one").json()["id"]
    assert rows(shared, ref, 1, "one").status_code == 200
    for answer in (rows(shared, ref, 1, "two"), encode(shared, {"ref": ref}, "two")):
        assert answer.status_code == 404
    assert rows(shared, ref, 1).status_code == 401
