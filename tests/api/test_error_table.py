"""The error table of the API, row by row, over HTTP."""

from typing import Any

import httpx
import pytest
import torch

from tests.live import Fleet
from tests.payloads import HIDDEN, TEXT, b64, constant, embeds_of, error, post, saved

GOOD = constant(0.5)
MANY = {"model": "tiny", "max_tokens": 2, "temperature": 0}


def said(text: str) -> dict[str, Any]:
    return {"role": "user", "content": text}


def refused(response: httpx.Response, status: int, phrase: str) -> dict[str, Any]:
    found = error(response)
    assert (response.status_code, phrase in found["message"]) == (status, True), found
    assert response.headers["x-request-id"]
    return found


def test_embeds_with_the_flag_off(plain_url: str) -> None:
    phrase = "You must set --enable-prompt-embeds"
    refused(post(plain_url, "/v1/completions", {**MANY, "prompt_embeds": GOOD}), 400, phrase)
    refused(
        post(plain_url, "/v1/completions", {**MANY, "prompt_embeds": "x" * 200_000}), 400, phrase
    )
    refused(
        post(plain_url, "/v1/completions", {**MANY, "prompt_embeds": {"ref": "pe-1"}}), 400, phrase
    )
    parts = [{"type": "prompt_embeds", "data": GOOD}]
    refused(post(plain_url, "/v1/completions", {**MANY, "prompt": parts}), 400, phrase)
    messages = [{"role": "user", "content": parts}]
    refused(post(plain_url, "/v1/chat/completions", {**MANY, "messages": messages}), 400, phrase)


@pytest.mark.parametrize(
    "fields", [{}, {"prompt": None}, {"prompt": ""}, {"prompt": []}, {"prompt_embeds": []}]
)
def test_neither_prompt_nor_embeds(url: str, fields: dict[str, Any]) -> None:
    phrase = "At least one of 'prompt' or 'prompt_embeds' must be provided"
    assert (
        refused(post(url, "/v1/completions", {**MANY, **fields}), 400, phrase)["param"] == "prompt"
    )


BAD_FILES = {
    "not base64": ("%%%%" * 50, "prompt_embeds must be valid base64"),
    "base64 with a newline": (GOOD[:76] + "\n" + GOOD[76:], "prompt_embeds must be valid base64"),
    "base64 cut short": (GOOD[:-1], "prompt_embeds must be valid base64"),
    "large and not base64": ("A" * 90_000 + "%" + "A" * 90_000, "prompt_embeds must be valid base64"),
    "url-safe base64": ("-_" * 400, "prompt_embeds must be valid base64"),
    "nothing": ("", "decoded data must be at least 100 bytes"),
    "99 bytes": (b64(bytes(99)), "decoded data must be at least 100 bytes"),
    "over the limit": (b64(bytes(10 * 1024 * 1024 + 1)), "exceeds maximum size of 10MB"),
    "no tensor file": (b64(bytes(1000)), "must be a torch.Tensor"),
    "a dictionary": (saved({"a": torch.ones(40)}), "must be a torch.Tensor"),
    "integers": (saved(torch.ones(40, HIDDEN, dtype=torch.int64)), "must be a torch.Tensor"),
    "sparse": (saved(torch.ones(40, HIDDEN).to_sparse()), "must be a torch.Tensor"),
    "expanded": (saved(torch.ones(1, HIDDEN).expand(40, HIDDEN)), "must be a torch.Tensor"),
    "one dimension": (saved(torch.ones(HIDDEN)), "must be a torch.Tensor"),
    "four dimensions": (saved(torch.ones(1, 1, 2, HIDDEN)), "must be a torch.Tensor"),
    "wrong hidden size": (saved(torch.ones(4, HIDDEN + 1)), "size of tensor must match"),
    "NaN": (constant(float("nan")), "must be finite"),
    "infinity": (constant(float("inf")), "must be finite"),
    "infinite after the cast": (saved(torch.full((4, HIDDEN), 1e300, dtype=torch.float64)), "must be finite"),
    "huge": (constant(1e6), "magnitude"),
    "another table's": (constant(0.5, table_id="0" * 32), "embedding table"),
    "too long": (constant(0.5, rows=600), "maximum context length"),
}  # fmt: skip


@pytest.mark.parametrize("case", BAD_FILES)
def test_embeddings_that_are_refused(url: str, case: str) -> None:
    text, phrase = BAD_FILES[case]
    refused(post(url, "/v1/completions", {**MANY, "prompt_embeds": text}), 400, phrase)
    refused(post(url, "/v1/completions", {**MANY, "prompt_embeds": [GOOD, text]}), 400, phrase)
    parts = [{"type": "text", "text": "look: "}, {"type": "prompt_embeds", "data": text}]
    refused(post(url, "/v1/completions", {**MANY, "prompt": parts}), 400, phrase)
    messages = [{"role": "user", "content": parts}]
    found = refused(post(url, "/v1/chat/completions", {**MANY, "messages": messages}), 400, phrase)
    # A file that is too large ends the reading of the body, where no place is known yet.
    if case not in ("too long", "over the limit"):
        assert found["param"].startswith("messages[0].content[1]")
        assert found["message"].startswith("messages[0].content[1]")


def test_the_limit_that_was_set_is_the_one_named(llama: Fleet) -> None:
    url = llama.serve(enable_prompt_embeds=True, max_prompt_embeds_bytes=2 * 1024 * 1024)
    found = post(url, "/v1/completions", {**MANY, "prompt_embeds": b64(bytes(2 * 1024 * 1024 + 1))})
    refused(found, 400, "exceeds maximum size of 2MB")


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        ("/v1/completions", {"prompt": [5] * 512}, "prompt"),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 512}, "max_tokens"),
        ("/v1/completions", {"prompt": TEXT, "max_tokens": 10**15}, "max_tokens"),
        ("/v1/chat/completions", {"messages": [said("lantern " * 600)]}, "messages"),
        ("/v1/chat/completions", {"messages": [said("lantern " * 60_000)]}, "messages"),
    ],
)
def test_too_long_for_the_model(url: str, path: str, fields: dict[str, Any], param: str) -> None:
    found = refused(post(url, path, {**MANY, **fields}), 400, "maximum context length is 512")
    assert (found["code"], found["param"]) == ("context_length_exceeded", param)


def test_an_unknown_model(url: str) -> None:
    for path, fields in (
        ("/v1/completions", {"prompt": TEXT}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": TEXT}]}),
        ("/tokenize", {"prompt": TEXT}),
        ("/detokenize", {"tokens": [5]}),
    ):
        refused(post(url, path, {**fields, "model": "nobody"}), 404, "does not exist")
    refused(httpx.get(url + "/v1/models/org/nobody"), 404, "does not exist")


def test_what_is_sent_in_place_of_base64_is_told_how_to_be_sent(url: str) -> None:
    how = "send base64 of a tensor file"
    refused(post(url, "/v1/completions", {**MANY, "prompt_embeds": [0.5, 1.5]}), 400, how)
    refused(post(url, "/v1/completions", {**MANY, "prompt_embeds": [[0.5], [1.5]]}), 400, how)
    refused(post(url, "/v1/prompt_embeds", {"data": [0.5]}), 400, how)
    messages = [{"role": "user", "content": [{"type": "prompt_embeds", "data": [0.5]}]}]
    refused(post(url, "/v1/chat/completions", {**MANY, "messages": messages}), 400, how)
    for data in (GOOD, GOOD * 100):
        uri = f"data:application/octet-stream;base64,{data}"
        found = post(url, "/v1/completions", {**MANY, "prompt_embeds": uri})
        refused(found, 400, "must be valid base64: drop the `data:...;base64,` prefix")


def test_an_unknown_ref_and_a_part_without_multipart(url: str) -> None:
    refused(
        post(url, "/v1/completions", {**MANY, "prompt_embeds": {"ref": "pe-1"}}), 404, "not found"
    )
    refused(
        post(url, "/v1/completions", {**MANY, "prompt_embeds": {"part": "a"}}), 400, "not multipart"
    )
    refused(post(url, "/v1/completions", {**MANY, "prompt_embeds": {}}), 400, "exactly one of")
    for part, status, phrase in (
        ({"ref": "pe-1"}, 404, "not found"),
        ({"part": "a"}, 400, "not multipart"),
        ({}, 400, "exactly one of"),
        ({"data": GOOD, "ref": "pe-1"}, 400, "exactly one of"),
        ({"data": 5}, 400, "data"),
    ):
        parts = [{"type": "prompt_embeds", **part}]
        refused(post(url, "/v1/completions", {**MANY, "prompt": parts}), status, phrase)
        messages = [{"role": "user", "content": parts}]
        refused(post(url, "/v1/chat/completions", {**MANY, "messages": messages}), status, phrase)


@pytest.fixture(scope="module")
def keyed_url(llama: Fleet) -> str:
    return llama.serve(api_key=["one", "two"], enable_prompt_embeds=True)


def test_a_missing_or_wrong_key(keyed_url: str) -> None:
    body = {**MANY, "prompt": TEXT}
    for headers in (
        {},
        {"authorization": "Bearer thre"},
        {"authorization": "one"},
        {"authorization": "Basic one"},
    ):
        response = post(keyed_url, "/v1/completions", body, **headers)
        refused(response, 401, "API key")
        assert response.headers["www-authenticate"] == "Bearer"
    assert httpx.get(keyed_url + "/v1/models").status_code == 401
    assert post(keyed_url, "/tokenize", {"prompt": "x"}).status_code == 401
    assert post(keyed_url, "/v1/completions", body, authorization="Bearer two").status_code == 200


def test_what_needs_no_key(keyed_url: str) -> None:
    for path in (
        "/live",
        "/ready",
        "/health",
        "/version",
        "/metrics",
        "/openapi.json",
        "/docs",
        "/",
    ):
        assert httpx.get(keyed_url + path).status_code == 200


def test_a_content_encoding_that_is_not_read(url: str) -> None:
    refused(
        post(url, "/v1/completions", {"prompt": TEXT}, content_encoding="gzip"), 415, "identity"
    )
    refused(
        httpx.post(url + "/v1/completions", content=b"a=b", headers={"content-type": "text/plain"}),
        415,
        "application/json",
    )
    assert (
        post(
            url, "/v1/completions", {**MANY, "prompt": TEXT}, content_encoding="identity"
        ).status_code
        == 200
    )


def test_a_body_over_the_limit(llama: Fleet) -> None:
    url = llama.serve(max_body_bytes=100_000)
    refused(post(url, "/v1/completions", {"prompt": "x" * 100_000}), 413, "limit of 100000 bytes")
    chunks = (b"x" * 50_000 for _ in range(3))
    refused(
        httpx.post(
            url + "/v1/completions", content=chunks, headers={"content-type": "application/json"}
        ),
        413,
        "limit of 100000",
    )


def test_what_does_not_exist(url: str) -> None:
    refused(httpx.get(url + "/v2"), 404, "does not exist")
    for path in (
        "/models",
        "/models/org/name",
        "/completions",
        "/chat/completions",
        "/prompt_embeds",
    ):
        refused(httpx.post(url + path), 404, f"did you mean /v1{path}? A base_url ends in /v1")
    assert "did you mean" not in httpx.get(url + "/v2").text
    response = httpx.get(url + "/v1/completions")
    refused(response, 405, "takes POST, got GET")
    assert response.headers["allow"] == "POST"
    assert httpx.delete(url + "/v1/models").status_code == 405


def test_echo_suffix_and_prompt_logprobs_need_token_ids(url: str) -> None:
    for fields in ({"echo": True}, {"suffix": "x"}, {"prompt_logprobs": 1}):
        response = post(url, "/v1/completions", {**MANY, "prompt_embeds": GOOD, **fields})
        assert refused(response, 400, "rows have no token ids")["param"] == next(iter(fields))


def test_a_batch_where_one_prompt_belongs(llama: Fleet, url: str) -> None:
    rows = embeds_of(llama)
    parts = [{"type": "prompt_embeds", "data": saved(torch.stack([rows, rows]))}]
    refused(post(url, "/v1/completions", {**MANY, "prompt": parts}), 400, "batch of 2")
