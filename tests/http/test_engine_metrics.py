"""The engines' counters among the frontend's."""

import asyncio
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from inlay.base.errors import DeadlineExceededError
from inlay.http.metrics.engine import PACE, WITHIN, EngineMetrics
from inlay.messages.commands import ReadStats
from tests.live import Fleet
from tests.payloads import constant, post

LABELS = {"model_name": "tiny", "engine": "local-0"}
TEXT = (
    "the lighthouse keeper counted the ships that passed along the coast before the storm came in"
)


def values(url: str) -> dict[str, float]:
    """Samples of the one worker, by name."""
    text = httpx.get(url + "/metrics").text
    return {
        sample.name: sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if sample.labels == LABELS
    }


def test_the_engines_counters_are_shown_as_they_are_now(llama: Fleet) -> None:
    url = llama.serve(enable_prompt_embeds=True)
    before = values(url)
    assert before["inlay:worker_answers"] == 1
    for _ in range(2):
        post(url, "/v1/completions", {"prompt": TEXT, "max_tokens": 3, "cache_salt": "metrics"})
    post(url, "/v1/completions", {"prompt_embeds": constant(0.25, rows=7), "max_tokens": 3})
    after = values(url)
    grown = {name: after[name] - before[name] for name in after}
    assert grown["inlay:engine_rows_total"] == 7
    assert 0 < grown["vllm:prefix_cache_hits_total"] < grown["vllm:prefix_cache_queries_total"]
    assert grown["inlay:engine_steps_total"] > 0
    assert grown["vllm:num_preemptions_total"] == 0
    assert (after["vllm:num_requests_running"], after["vllm:num_requests_waiting"]) == (0, 0)
    assert 0 <= after["vllm:kv_cache_usage_perc"] <= 1


def test_a_worker_that_does_not_answer_is_missing_and_not_zero(
    llama: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = llama.serve()
    (worker,) = llama.plane.workers()

    async def silent(command: Any, within: float) -> Any:
        raise DeadlineExceededError(f"no answer within {within} s")

    monkeypatch.setattr(worker, "call", silent)
    found = values(url)
    assert found.pop("inlay:worker_answers") == 0
    # What is known without an answer.
    assert found == {"inlay:worker_well": 1, "inlay:worker_places": 64}


def test_how_workers_are_is_shown(llama: Fleet) -> None:
    text = httpx.get(llama.serve() + "/metrics").text
    for line in (
        'vllm:engine_sleep_state{engine="local-0",model_name="tiny",sleep_state="awake"} 1.0',
        'vllm:engine_sleep_state{engine="local-0",model_name="tiny",sleep_state="weights_offloaded"} 0.0',
        "inlay:workers_missing 0.0",
    ):
        assert line in text


def test_how_near_a_model_is_to_its_own_code_is_shown(llama: Fleet) -> None:
    url = llama.serve()
    check = httpx.get(url + "/v1/models/tiny").json()["self_check"]
    assert (check["result"], 0 < check["distance"] < check["bound"]) == ("passed", True)
    of = 'engine="local-0",model_name="tiny",result="passed"'
    shown = f"inlay:self_check_distance{{{of}}} {check['distance']}"
    assert shown in httpx.get(url + "/metrics").text


async def test_many_who_look_at_once_ask_the_workers_once() -> None:
    asked = 0

    def none() -> list[Any]:
        nonlocal asked
        asked += 1
        return []

    metrics = EngineMetrics(none)
    await asyncio.gather(*(metrics.refresh() for _ in range(50)))
    assert asked == 1
    await metrics.refresh()
    assert asked == 2


@pytest.mark.thorough
def test_scrapes_ask_the_workers_twice_a_second_and_are_not_older_than_they_are(
    llama: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    url = llama.serve()
    (worker,) = llama.plane.workers()
    original, asked = worker.call, list[float]()

    async def counted(command: Any, within: float) -> Any:
        if isinstance(command, ReadStats) and within == WITHIN:
            asked.append(asyncio.get_running_loop().time())
        return await original(command, within)

    monkeypatch.setattr(worker, "call", counted)
    with ThreadPoolExecutor(8) as threads:
        texts = list(threads.map(lambda _: httpx.get(url + "/metrics").text, range(48)))
    assert all("inlay:worker_answers" in text for text in texts)
    assert all(later - earlier > 0.9 * PACE for earlier, later in pairwise(asked))
    post(url, "/v1/completions", {"prompt": TEXT, "max_tokens": 3})
    before = values(url)["inlay:engine_steps_total"]
    post(url, "/v1/completions", {"prompt": TEXT, "max_tokens": 3})
    assert values(url)["inlay:engine_steps_total"] > before


def test_what_the_router_decides_and_what_waits_is_shown_by_model(llama: Fleet) -> None:
    url = llama.serve()

    def shown() -> dict[tuple[str, str], float]:
        families = text_string_to_metric_families(httpx.get(url + "/metrics").text)
        return {
            (sample.name, sample.labels.get("attempt", "")): sample.value
            for family in families
            for sample in family.samples
            if sample.labels.get("model_name") == "tiny"
        }

    before = shown()
    assert before["inlay:router_requests_waiting", ""] == 0
    post(url, "/v1/completions", {"prompt": TEXT, "max_tokens": 3, "n": 2, "temperature": 1})
    decisions = ("inlay:router_decisions_total", "first")
    assert shown()[decisions] - before.get(decisions, 0) == 2
