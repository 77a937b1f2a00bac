"""Paths behind proxies, whether or not these remove their prefix, and queries for other servers."""

import httpx
import pytest
from openai import OpenAI

from inlay.http import FrontendSettings
from tests.live import Fleet
from tests.payloads import error, post

SHORT = {"prompt": "a", "max_tokens": 1}


@pytest.fixture(scope="module")
def below(llama: Fleet) -> str:
    """The base URL of a frontend below the prefix /llm."""
    url = llama.serve(root_path="/llm")
    assert url.endswith("/llm")
    return url.removesuffix("/llm")


@pytest.mark.parametrize("prefix", ["", "/llm"], ids=["removed", "kept"])
def test_a_path_is_served_whether_or_not_the_proxy_removes_its_prefix(
    below: str, prefix: str
) -> None:
    assert httpx.get(f"{below}{prefix}/v1/models/tiny").json()["id"] == "tiny"
    assert httpx.get(f"{below}{prefix}/").status_code == 200
    assert post(below, f"{prefix}/v1/completions", SHORT).status_code == 200
    wrong = httpx.get(f"{below}{prefix}/v1/nothing")
    assert wrong.status_code == 404
    assert error(wrong)["message"] == "GET /v1/nothing does not exist"
    assert httpx.get(f"{below}{prefix}{'/llm' * 1500}/v1/models").status_code == 404


def test_the_description_says_below_which_path_clients_see_it(below: str, url: str) -> None:
    for base, path in ((below, "/llm"), (url, "/")):
        assert httpx.get(base + "/openapi.json").json()["servers"] == [{"url": path}]


@pytest.mark.parametrize("path", ["llm", "/llm", "/llm/", "llm/"])
def test_a_prefix_may_be_written_with_or_without_slashes(path: str) -> None:
    assert FrontendSettings(root_path=path).root_path == "/llm"
    assert FrontendSettings(root_path="/").root_path == FrontendSettings().root_path == ""


@pytest.mark.parametrize(
    ("path", "hint"),
    [
        ("/llm/v1/models", "did you mean /v1/models? If a proxy keeps /llm, start the server with --root-path /llm"),
        ("/a/b/v1/models", "did you mean /v1/models? If a proxy keeps /a/b, start the server with --root-path /a/b"),
        ("/models", "did you mean /v1/models? A base_url ends in /v1"),
        ("/v1/health", "did you mean /health?"),
        ("/nothing", ""),
        ("/nothing/", ""),
        ("//", ""),
        ("/a" * 4000, ""),
    ],
)  # fmt: skip
def test_a_path_of_no_route_is_a_404_that_says_what_to_do(url: str, path: str, hint: str) -> None:
    answer = httpx.get(url + path)
    assert answer.status_code == 404
    message = error(answer)["message"]
    assert message.endswith("does not exist" + (f": {hint}" if hint else "")), message


@pytest.mark.parametrize(
    "path",
    ["/v1/models", "/v1/models/tiny", "/live", "/health", "/version", "/openapi.json", "/load"],
)
@pytest.mark.parametrize(
    "version", [{}, {"anthropic-version": "2023-06-01"}], ids=["", "anthropic"]
)
def test_query_parameters_of_other_servers_are_ignored(
    url: str, path: str, version: dict[str, str]
) -> None:
    plain = httpx.get(url + path, headers=version)
    for query in ("client_version=0.1", "api-version=2024-10-21&a=&a=1", "%ff", "="):
        answer = httpx.get(f"{url}{path}?{query}", headers=version)
        assert (answer.status_code, answer.content) == (plain.status_code, plain.content)


def test_a_client_that_adds_a_query_to_every_request_is_answered(url: str) -> None:
    query = {"api-version": "2024-10-21"}
    with OpenAI(base_url=url + "/v1", api_key="none", default_query=query) as client:
        assert [model.id for model in client.models.list()][:1] == ["tiny"]
        said = client.completions.create(model="tiny", prompt="a", max_tokens=1)
        assert said.choices[0].finish_reason == "length"
