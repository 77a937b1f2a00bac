"""`/v1/models` through Anthropic's own client, and unchanged for all others."""

from collections.abc import Iterator

import anthropic
import httpx
import pytest

NAMES = ["tiny", "org/tiny"]
VERSION = {"anthropic-version": "2023-06-01"}


@pytest.fixture(scope="module")
def client(url: str) -> Iterator[anthropic.Anthropic]:
    with anthropic.Anthropic(base_url=url, api_key="none", max_retries=0) as client:
        yield client


def test_models_are_listed_in_anthropics_form_and_in_pages(
    client: anthropic.Anthropic, url: str
) -> None:
    entries = httpx.get(f"{url}/v1/models").json()["data"]
    found = list(client.models.list())
    assert [model.id for model in found] == [entry["id"] for entry in entries] == NAMES
    assert found[0].type == "model"
    assert found[0].created_at.timestamp() == entries[0]["created"]
    assert found[0].max_input_tokens == entries[0]["max_model_len"]
    # The client asks for page after page by itself.
    page = client.models.list(limit=1)
    assert (page.first_id, page.last_id, page.has_more) == ("tiny", "tiny", True)
    assert [model.id for model in page] == NAMES
    back = client.models.list(limit=2, before_id="org/tiny")
    assert ([model.id for model in back.data], back.has_more) == (["tiny"], False)
    none = client.models.list(after_id="org/tiny")
    assert (none.data, none.first_id, none.has_more) == ([], None, False)


def test_one_model_is_retrieved_and_another_does_not_exist(client: anthropic.Anthropic) -> None:
    assert client.models.retrieve("tiny").display_name == "tiny"
    with pytest.raises(anthropic.NotFoundError, match="does not exist") as refused:
        client.models.retrieve("nobody")
    assert refused.value.body["type"] == "error"  # type: ignore[index]
    assert refused.value.response.headers["request-id"]


def test_the_form_follows_the_header_alone(url: str) -> None:
    plain = httpx.get(f"{url}/v1/models/tiny")
    other = httpx.get(f"{url}/v1/models/tiny", headers=VERSION)
    assert (plain.json()["object"], other.json()["type"]) == ("model", "model")
    assert plain.headers["vary"] == other.headers["vary"] == "anthropic-version"


@pytest.mark.parametrize(
    ("query", "named"),
    [
        ("limit=0", "limit"),
        ("limit=1001", "limit"),
        ("limit=x", "limit"),
        ("limit=" + "9" * 5000, "limit"),
        ("limit=000000001" + "9" * 20, "limit"),
        ("after_id=nobody", "after_id"),
        ("before_id=nobody", "before_id"),
        ("after_id=tiny&before_id=tiny", "after_id"),
    ],
)
def test_a_page_that_cannot_be_is_a_400(url: str, query: str, named: str) -> None:
    answer = httpx.get(f"{url}/v1/models?{query}", headers=VERSION)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["type"] == "invalid_request_error"
    assert named in answer.json()["error"]["message"]


def test_pages_are_those_of_anthropics_form_alone(url: str) -> None:
    answer = httpx.get(f"{url}/v1/models?limit=1")
    assert answer.json()["data"] == httpx.get(f"{url}/v1/models").json()["data"]
    assert len(answer.json()["data"]) > 1


def test_a_version_that_is_not_served_is_a_400(url: str) -> None:
    answer = httpx.get(f"{url}/v1/models", headers={"anthropic-version": "1"})
    assert answer.status_code == 400
    assert "2023-06-01" in answer.json()["error"]["message"]
