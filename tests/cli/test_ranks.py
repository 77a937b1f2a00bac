"""Data-parallel ranks of one command: each a worker, chosen by what it has cached."""

import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.models import tiny
from tests.serving import START_SECONDS, Served, serving

pytestmark = pytest.mark.slow
RANKS = 2


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    words = (
        "--device",
        "cpu",
        "--num-threads",
        1,
        "--served-model-name",
        "m",
        "--enable-sleep-mode",
        # What was sent counts no longer as cached: the ranks' own events alone say who has what.
        "--router-cache-ttl",
        0.001,
    )
    with serving(
        tiny("llama"), "--data-parallel-size", RANKS, *words, "--admin-api-key", "chief"
    ) as served:
        hits(served)
        yield served


def hits(server: Served) -> dict[str, float]:
    """Positions found cached, by worker, once all answer.

    One that is busy for long may be missing.
    """
    until = time.monotonic() + START_SECONDS
    while True:
        text = httpx.get(
            server.url + "/metrics", headers={"authorization": "Bearer chief"}, timeout=180
        ).text
        found = re.findall(
            r'^vllm:prefix_cache_hits_total\{engine="([^"]+)".*\} (\S+)$', text, re.MULTILINE
        )
        if len(found) == RANKS:
            return {engine: float(value) for engine, value in found}
        assert time.monotonic() < until
        time.sleep(0.1)


def ask(server: Served, family: int) -> int:
    """Cached tokens of a prompt."""
    body = {"model": "m", "prompt": [family + 3] * 200, "max_tokens": 2, "temperature": 0}
    answer = httpx.post(
        server.v1 + "/completions",
        json=body,
        headers={"authorization": "Bearer chief"},
        timeout=180,
    )
    assert answer.status_code == 200, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def tell(server: Served, path: str) -> dict[str, Any]:
    answer = httpx.post(server.url + path, headers={"authorization": "Bearer chief"}, timeout=180)
    assert answer.status_code == 200, answer.text
    body: dict[str, Any] = answer.json()
    return body


def test_a_prompt_goes_to_the_rank_that_has_it_and_all_ranks_forget_when_told(
    server: Served,
) -> None:
    families = range(12)
    with ThreadPoolExecutor(len(families)) as together:
        assert list(together.map(lambda family: ask(server, family), families)) == [0] * len(
            families
        )
    before = hits(server)
    for family in families:
        assert ask(server, family) >= 192
    after = hits(server)
    # Those that came at once were spread, and each rank counts for itself.
    assert all(after[engine] > before[engine] for engine in after)
    for path in ("/reset_prefix_cache", "/sleep"):
        assert len(tell(server, path)["workers"]) == RANKS
        if path == "/sleep":
            tell(server, "/wake_up")
        assert [ask(server, family) for family in families] == [0] * len(families)
        assert ask(server, 0) >= 192
