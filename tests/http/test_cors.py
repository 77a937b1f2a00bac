"""Which pages of other origins a browser lets call the API."""

import httpx
import pytest
from pydantic import ValidationError

from inlay.http import FrontendSettings
from tests.live import Fleet

PAGE = "https://chat.example"
ASK = {
    "access-control-request-method": "POST",
    "access-control-request-headers": "authorization,content-type",
}


def cors_of(response: httpx.Response) -> dict[str, str]:
    return {
        name: value
        for name, value in response.headers.items()
        if name.startswith("access-control-")
    }


def preflight(url: str, origin: str, **headers: str) -> httpx.Response:
    return httpx.options(url + "/v1/completions", headers={"origin": origin, **ASK, **headers})


def test_no_page_may_call_unless_that_is_set(url: str) -> None:
    assert cors_of(httpx.get(url + "/v1/models", headers={"origin": PAGE})) == {}
    asked = preflight(url, PAGE)
    assert (asked.status_code, cors_of(asked)) == (405, {})


def test_an_allowed_origin_may_call_and_others_may_not(llama: Fleet) -> None:
    url = llama.serve(allowed_origins=[PAGE, "http://localhost:3000"], api_key=["one"])
    asked = preflight(url, PAGE)
    # A browser asks without a key.
    assert (asked.status_code, asked.content) == (204, b"")
    assert asked.headers["access-control-allow-origin"] == PAGE
    assert asked.headers["access-control-allow-headers"] == ASK["access-control-request-headers"]
    assert "POST" in asked.headers["access-control-allow-methods"]
    got = httpx.get(url + "/v1/models", headers={"origin": PAGE, "authorization": "Bearer one"})
    assert (got.status_code, got.headers["access-control-allow-origin"]) == (200, PAGE)
    assert "x-request-id" in got.headers["access-control-expose-headers"]
    for other in (
        "https://evil.example",
        "https://chat.example.evil",
        "http://chat.example",
        "null",
        PAGE + "/",
    ):
        assert cors_of(preflight(url, other)) == {}
        refused = httpx.get(
            url + "/v1/models", headers={"origin": other, "authorization": "Bearer one"}
        )
        assert cors_of(refused) == {}
        assert refused.headers["vary"].startswith("Origin")


def test_a_page_may_read_why_it_was_refused(llama: Fleet) -> None:
    url = llama.serve(allowed_origins=[PAGE], api_key=["one"])
    refused = httpx.get(url + "/v1/models", headers={"origin": PAGE})
    assert (refused.status_code, refused.headers["access-control-allow-origin"]) == (401, PAGE)


def test_all_origins_may_be_allowed_and_none_gets_to_send_cookies(llama: Fleet) -> None:
    url = llama.serve(allowed_origins=["*"])
    for response in (preflight(url, PAGE), httpx.get(url + "/v1/models", headers={"origin": PAGE})):
        assert response.headers["access-control-allow-origin"] == "*"
        assert "access-control-allow-credentials" not in response.headers


def test_a_stream_is_for_the_page_too(llama: Fleet) -> None:
    url = llama.serve(allowed_origins=[PAGE])
    body = {"prompt": "a", "max_tokens": 1, "stream": True}
    response = httpx.post(url + "/v1/completions", json=body, headers={"origin": PAGE})
    assert response.headers["access-control-allow-origin"] == PAGE
    assert response.headers["x-content-type-options"] == "nosniff"


@pytest.mark.parametrize(
    "origin",
    ["chat.example", "https://", "https://chat.example/", "https://chat.example/page", "https://Chat.example", "ftp://chat.example", "null", "", "https://*.example/"],
)  # fmt: skip
def test_what_is_no_origin_is_refused(origin: str) -> None:
    with pytest.raises(ValidationError, match="scheme://host"):
        FrontendSettings(allowed_origins=[origin])
