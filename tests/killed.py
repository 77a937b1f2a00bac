"""A stream whose worker is killed in the middle of it."""

import json
from pathlib import Path
from typing import Any

import httpx

from tests.parts import workers_of
from tests.serving import START_SECONDS, Served, serving
from tests.sse import events

Step = dict[str, Any]
"""A token of an answer, with the two largest logprobs at its place."""


def ask(
    served: Served, client: httpx.Client, prompt: str, length: int, cut: int | None = None
) -> list[Step]:
    """`length` tokens of an answer, each with what else was likely.

    Its worker dies after `cut` of them, if given.
    """
    body = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": length,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "logprobs": 2,
        "return_token_ids": True,
    }
    found: list[Step] = []
    workers = workers_of(served.process.pid)
    before = {worker: sum(worker.cpu_times()[:2]) for worker in workers}
    with client.stream("POST", served.v1 + "/completions", json=body) as stream:
        assert stream.status_code == 200
        for data in events(stream):
            if data == "[DONE]":
                continue
            event = json.loads(data)
            assert "error" not in event, event
            for choice in event["choices"]:
                logprobs = choice.get("logprobs") or {"top_logprobs": []}
                ids = choice.get("token_ids") or []
                for id_, top in zip(ids, logprobs["top_logprobs"], strict=True):
                    found.append({"id": id_, "top": sorted(top.values(), reverse=True)})
            if cut is not None and len(found) >= cut:
                assert len(found) < length
                cut = None
                # The one that answers is the one that has worked since.
                max(workers, key=lambda worker: sum(worker.cpu_times()[:2]) - before[worker]).kill()
    return found


def served_and_killed(
    path: Path, prompt: str, length: int, cut: int, *words: str, within: float = START_SECONDS
) -> tuple[str, list[Step], list[Step]]:
    """What the card says of greedy decoding, an answer, and one whose worker was killed."""
    with (
        serving(
            path, "--served-model-name", "m", "--data-parallel-size", "2", *words, within=within
        ) as served,
        httpx.Client(timeout=within) as client,
    ):
        (entry,) = client.get(served.v1 + "/models").json()["data"]
        assert entry["dtype"] == "bfloat16"
        expected = ask(served, client, prompt, length)
        found = ask(served, client, prompt, length, cut)
    assert len(expected) == len(found) == length
    return entry["resuming"]["greedy"], expected, found


def differs_only_where_two_tokens_are_near(
    expected: list[Step], found: list[Step], *, cut: int, near: float
) -> None:
    """Check an answer whose worker died after `cut` tokens against the one that went through.

    What was shown before is in both, so that a loss or a repetition would part them at once.
    """
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one["id"] != other["id"]:
            assert index >= cut
            assert one["top"][0] - one["top"][1] < near
            break
