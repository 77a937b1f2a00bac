"""Two ranks of vLLM behind one door: the router sends each prompt to the one that has it cached."""

import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.engines.vllm.serving import model
from tests.engines.vllm.test_over_http import START_SECONDS, encoded, serve
from tests.equality.reference import rows_of
from tests.serving import Served

RANKS = 2
SETTLING_SECONDS = 5
"""Time for the ranks' cache events, that of the reset among them, to reach a busy router."""
CHIEF = {"authorization": "Bearer chief"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serve(model("qwen3"), "--data-parallel-size", RANKS, admin_key="chief") as served:
        engines(served)
        yield served


def engines(server: Served) -> dict[str, float]:
    """Positions found cached, by rank, once all answer.

    One that is busy for long may be missing.
    """
    until = time.monotonic() + START_SECONDS
    while True:
        text = httpx.get(server.url + "/metrics", headers=CHIEF, timeout=60).text
        found = re.findall(
            r'^vllm:prefix_cache_hits_total\{engine="([^"]+)".*\} (\S+)$', text, re.MULTILINE
        )
        if len(found) == RANKS:
            return {engine: float(value) for engine, value in found}
        assert time.monotonic() < until
        time.sleep(0.1)


def ask(server: Served, fields: dict[str, Any]) -> int:
    """Positions of a prompt that were cached."""
    body = {"model": "m", "max_tokens": 2, "temperature": 0, **fields}
    answer = httpx.post(server.v1 + "/completions", json=body, headers=CHIEF, timeout=120)
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def text(family: int) -> dict[str, Any]:
    return {"prompt": [family + 3] * 200}


def rows(family: int) -> dict[str, Any]:
    return {"prompt_embeds": encoded(rows_of(model("qwen3"), [family + 3] * 200))}


def mixed(family: int) -> dict[str, Any]:
    values = encoded(rows_of(model("qwen3"), [family + 3] * 100))
    return {
        "prompt": [
            {"type": "token_ids", "token_ids": [family + 3] * 100},
            {"type": "prompt_embeds", "data": values},
        ]
    }


@pytest.mark.parametrize("form", [text, rows, mixed])
def test_a_prompt_goes_to_the_rank_that_has_it_until_all_forget(
    server: Served, form: Callable[[int], dict[str, Any]]
) -> None:
    prompts = [form(family) for family in range(12)]
    httpx.post(server.url + "/reset_prefix_cache", headers=CHIEF, timeout=120).raise_for_status()
    with ThreadPoolExecutor(len(prompts)) as together:
        assert list(together.map(lambda prompt: ask(server, prompt), prompts)) == [0] * len(prompts)
    time.sleep(SETTLING_SECONDS)
    before = engines(server)
    assert all(ask(server, prompt) >= 192 - 32 for prompt in prompts)
    after = engines(server)
    # Those that came at once were spread, and each rank counts for itself.
    assert all(after[engine] > before[engine] for engine in after)
    told = httpx.post(server.url + "/reset_prefix_cache", headers=CHIEF, timeout=120).json()
    assert len(told["workers"]) == RANKS
    assert ask(server, prompts[0]) == 0
