"""`kill -9` of a worker in the middle of a stream of the bundled model, which is in bfloat16."""

import json
from typing import Any

import httpx
import pytest

from inlay import demo
from inlay.engine.torch.native import kernels
from tests.parts import workers_of
from tests.serving import Served, serving
from tests.sse import events

NEAR = 0.25
"""Logits; as in `tests/engine/torch/test_bfloat16.py`."""

LENGTH, CUT = 300, 60
LONG, LONG_CUT = 2000, 1300
"""Tokens where the numbers are the same: of an answer, and before its worker dies."""

pytestmark = pytest.mark.slow


def ask(
    served: Served, client: httpx.Client, prompt: str, length: int, cut: int | None = None
) -> list[dict[str, Any]]:
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
    found: list[dict[str, Any]] = []
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
    length: int, cut: int, *words: str
) -> tuple[str, list[dict[str, Any]], list[dict[str, Any]]]:
    """What the card says of greedy decoding, an answer, and one whose worker was killed."""
    with (
        serving(
            demo.model_dir(), "--served-model-name", "m", "--data-parallel-size", "2", *words
        ) as served,
        httpx.Client(timeout=180) as client,
    ):
        (entry,) = client.get(served.v1 + "/models").json()["data"]
        assert entry["dtype"] == "bfloat16"
        prompt = demo.examples().completions[0].prompt
        expected = ask(served, client, prompt, length)
        found = ask(served, client, prompt, length, cut)
    assert len(expected) == len(found) == length
    return entry["resuming"]["greedy"], expected, found


def test_an_answer_whose_worker_is_killed_goes_on_and_differs_only_where_two_tokens_are_near() -> (
    None
):
    exactness, expected, found = served_and_killed(LENGTH, CUT, "--no-batch-invariant")
    assert exactness == "rounded"
    # What was shown before is in both, so that a loss or a repetition would part them at once.
    for index, (one, other) in enumerate(zip(expected, found, strict=True)):
        if one["id"] != other["id"]:
            assert index >= CUT
            assert one["top"][0] - one["top"][1] < NEAR
            break


@pytest.mark.skipif(
    (native := kernels()) is None or not native.products.pairs,
    reason="no products of pairs of bfloat16 here",
)
def test_with_batch_invariance_it_goes_on_with_the_same_numbers() -> None:
    exactness, expected, found = served_and_killed(LONG, LONG_CUT, "--batch-invariant")
    assert (exactness, found) == ("exact", expected)
