"""Sequences preempted for another client decode as they would alone."""

from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

from inlay.engine.torch.step import Core
from inlay.messages.request import Output, Request
from tests.engine.torch.test_step import Outcome, core, make_request, prompts, run

pytestmark = pytest.mark.usefixtures("overlap")

KINDS: tuple[dict[str, Any], ...] = (
    {},
    {"temperature": 0.9, "top_p": 0.95},
    {"temperature": 1.2, "repetition_penalty": 1.3, "frequency_penalty": 0.4},
)
LENGTH = 24


def make_requests() -> Iterator[Request]:
    """Requests of one client: each form of a prompt, greedy, drawn and penalised."""
    for number, (form, prompt) in enumerate(prompts("llama").items()):
        for kind, sampling in enumerate(KINDS):
            one = f"{form} {kind}"
            yield make_request(
                one, prompt, LENGTH, seed=number, logprobs=1, client="greedy", **sampling
            )


def told(outputs: list[Output]) -> list[tuple[int, float]]:
    """Tokens and logprobs; outputs are neither lost nor repeated."""
    assert [output.offset for output in outputs] == [
        sum(len(before.token_ids) for before in outputs[:n]) for n in range(len(outputs))
    ]
    ids = [id_ for output in outputs for id_ in output.token_ids]
    return list(
        zip(ids, [one.logprob for output in outputs for one in output.logprobs], strict=True)
    )


@cache
def expected_alone() -> dict[str, list[tuple[int, float]]]:
    """What is told of each request where no other runs."""
    alone = core(max_num_seqs=1, num_pages=64)
    return {one.id: told(run(alone, one)[one.id].deltas) for one in make_requests()}


@pytest.mark.parametrize(
    "changes",
    [{"max_num_seqs": 4}, {"num_pages": 22, "max_model_len": 160}],
    ids=["places", "pages"],
)
@pytest.mark.parametrize(
    "prefix_caching",
    [True, pytest.param(False, marks=pytest.mark.slow)],
    ids=["cached", "uncached"],
)
def test_a_sequence_that_yields_to_another_client_goes_on_as_if_nothing_had_happened(
    changes: dict[str, int], prefix_caching: bool
) -> None:
    expected = expected_alone()
    engine: Core = core("llama", prefix_caching=prefix_caching, **changes)
    outputs: list[Output] = []
    for one in make_requests():
        outputs += engine.admit(one)
    newcomers = 0
    for step in range(4000):
        if not len(engine):
            break
        if step % 12 == 5 and newcomers < 12:
            prompt = prompts("llama")["c-text"]
            new = make_request(f"new {newcomers}", prompt, 6, client=f"new {newcomers % 2}")
            outputs += engine.admit(new)
            newcomers += 1
        outputs += engine.step()
    assert len(engine) == 0
    assert engine.stats().preemptions >= 4
    found = {
        name: Outcome([output for output in outputs if output.request_id == name])
        for name in expected
    }
    assert all(outcome.last.finish_reason == "length" for outcome in found.values())
    for name, outcome in found.items():
        tokens = told(outcome.deltas)
        assert [id_ for id_, _ in tokens] == [id_ for id_, _ in expected[name]], name
        assert [logprob for _, logprob in tokens] == pytest.approx(
            [logprob for _, logprob in expected[name]], abs=1e-4
        )
