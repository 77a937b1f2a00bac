"""What an answer says of itself when asked: its times, and the weights that made it."""

import json
from typing import Any

import pytest

from tests.live import Fleet
from tests.payloads import post
from tests.sse import events

ASKED: dict[str, Any] = {"model": "tiny", "max_tokens": 6, "temperature": 0, "ignore_eos": True}
ROUTES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "one two"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "one two"}]},
}
TIMES = (
    "time_to_first_token_ms", "generation_time_ms", "queue_time_ms", "mean_itl_ms",
    "tokens_per_second",
)  # fmt: skip


@pytest.fixture(scope="module")
def timed(llama: Fleet) -> str:
    return llama.serve(enable_per_request_metrics=True)


def streamed(url: str, route: str, **more: Any) -> list[dict[str, Any]]:
    answer = post(url, route, {**ASKED, **ROUTES[route], "stream": True, **more})
    return [json.loads(data) for data in events(answer) if data != "[DONE]"]


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_has_its_times_where_the_server_shows_them(timed: str, route: str) -> None:
    found = post(timed, route, {**ASKED, **ROUTES[route]}).json()["metrics"]
    assert tuple(found) == TIMES
    assert found["time_to_first_token_ms"] > 0
    assert found["tokens_per_second"] > 0
    # 0 where all tokens came at once, as on a machine that stood still.
    assert found["generation_time_ms"] >= 0
    assert found["queue_time_ms"] is None or found["queue_time_ms"] > 0
    assert found["mean_itl_ms"] == pytest.approx(found["generation_time_ms"] / 5)
    spent = found["time_to_first_token_ms"] + found["generation_time_ms"]
    assert found["tokens_per_second"] == pytest.approx(6000 / spent)
    *others, last = streamed(timed, route, stream_options={"include_usage": True})
    assert tuple(last["metrics"]) == TIMES
    assert not any("metrics" in each for each in others)
    assert not any("metrics" in each for each in streamed(timed, route))


@pytest.mark.parametrize("route", ROUTES)
def test_times_are_those_of_one_choice_and_of_servers_that_show_them(
    timed: str, url: str, route: str
) -> None:
    assert post(timed, route, {**ASKED, **ROUTES[route], "n": 2}).json()["metrics"] is None
    assert post(url, route, {**ASKED, **ROUTES[route]}).json()["metrics"] is None
    told = streamed(url, route, stream_options={"include_usage": True})
    assert not any("metrics" in each for each in told)


@pytest.mark.parametrize("route", ROUTES)
def test_an_answer_names_the_weights_that_made_it(url: str, llama: Fleet, route: str) -> None:
    (worker,) = llama.plane.workers()
    whole = [{"version": worker.card.weights_id, "start": 0, "end": 6}]
    asked = {**ASKED, **ROUTES[route], "return_weight_versions": True}
    choices = post(url, route, {**asked, "n": 2}).json()["choices"]
    assert [choice["weight_versions"] for choice in choices] == [whole, whole]
    pieces = [
        choice
        for each in streamed(url, route, return_weight_versions=True)
        for choice in each["choices"]
    ]
    told = [piece["weight_versions"] for piece in pieces if "weight_versions" in piece]
    assert told == [whole]
    assert "weight_versions" in pieces[-1]
    (plain,) = post(url, route, {**asked, "return_weight_versions": False}).json()["choices"]
    assert "weight_versions" not in plain
