"""Effects of the router that clients see.

Sessions, and what becomes of requests when all workers are full.
"""

import threading
from collections.abc import Iterator

import httpx
import pytest

from inlay.router import Router
from inlay.router.settings import RouterSettings
from tests.live import SECRET, Fleet, fleet, until
from tests.models import tiny
from tests.payloads import error, post

SHORT = {"prompt": "a", "max_tokens": 2, "ignore_eos": True, "temperature": 0}
LONG = {"prompt": "a", "max_tokens": 400, "ignore_eos": True}


@pytest.fixture(scope="module")
def narrow() -> Iterator[Fleet]:
    """A worker that has one sequence at a time, and may have no other waiting."""
    with fleet(tiny("llama"), max_num_seqs=1) as running:
        running.router = Router(
            running.plane,
            RouterSettings(router_worker_backlog=0, router_queue_size=4),
            secret=SECRET,
        )
        yield running


@pytest.fixture(scope="module")
def narrow_url(narrow: Fleet) -> str:
    return narrow.serve()


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions", "/v1/responses"])
@pytest.mark.parametrize("name", ["", "x" * 513])
def test_a_session_has_a_name_of_some_length(url: str, path: str, name: str) -> None:
    asked = {"prompt": "a", "messages": [{"role": "user", "content": "a"}], "input": "a"}
    field = {
        "/v1/completions": "prompt",
        "/v1/chat/completions": "messages",
        "/v1/responses": "input",
    }[path]
    for more, headers, param in (
        ({"prompt_cache_key": name}, {}, "prompt_cache_key"),
        ({}, {"x-session-id": name}, "X-Session-Id"),
    ):
        answer = httpx.post(url + path, json={field: asked[field], **more}, headers=headers)
        assert answer.status_code == 400
        assert error(answer)["param"] == param
        assert "1 to 512 characters" in error(answer)["message"]


def test_a_session_may_be_named_in_the_body_or_in_a_header(url: str) -> None:
    plain = post(url, "/v1/completions", SHORT).json()["choices"]
    for more, headers in (({"prompt_cache_key": "s"}, {}), ({}, {"x-session-id": "s"})):
        answer = httpx.post(url + "/v1/completions", json={**SHORT, **more}, headers=headers)
        assert answer.json()["choices"] == plain


def test_prompts_of_one_request_wait_for_each_other_when_there_is_room_for_one(
    narrow_url: str,
) -> None:
    answer = post(narrow_url, "/v1/completions", {**SHORT, "prompt": ["a", "b", "c"]})
    assert answer.status_code == 200, answer.text
    assert [choice["index"] for choice in answer.json()["choices"]] == [0, 1, 2]


def test_a_request_of_more_choices_than_may_wait_is_refused_whole(
    narrow: Fleet, narrow_url: str
) -> None:
    answer = post(narrow_url, "/v1/completions", {**SHORT, "prompt": ["a"] * 4, "n": 2})
    assert answer.status_code == 429, answer.text
    assert narrow.idle_within(60)
    assert narrow.router.num_waiting == 0


@pytest.mark.thorough
def test_when_all_is_full_requests_wait_and_more_than_may_wait_are_503(
    narrow: Fleet, narrow_url: str
) -> None:
    def ask(**fields: object) -> httpx.Response:
        return httpx.post(narrow_url + "/v1/completions", json={**LONG, **fields}, timeout=180)

    answers: list[httpx.Response] = []
    first = threading.Thread(target=lambda: answers.append(ask(n=4)))
    first.start()
    until(lambda: narrow.running() > 1)
    waiting = [threading.Thread(target=lambda: answers.append(ask(max_tokens=1))) for _ in range(2)]
    for thread in waiting:
        thread.start()
    until(lambda: narrow.router.num_waiting == 2)
    mine = ask()
    assert (mine.status_code, mine.headers["retry-after"] >= "1") == (429, True)
    assert "your share of 2" in error(mine)["message"]
    full = ask(n=3)
    assert full.status_code == 503
    assert "would pass the limit of 4" in error(full)["message"]
    for thread in (first, *waiting):
        thread.join()
    assert [answer.status_code for answer in answers] == [200] * 3
    assert narrow.router.num_waiting == 0
