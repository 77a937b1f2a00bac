"""Outputs that vLLM has joined, because nobody read them yet, are read as those that it has not."""

from typing import Any

import pytest

from inlay.engine.vllm.request_tracker import VllmRequestTracker
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Output, TokenLogprobs
from tests.engine.conformance import make_request

pytestmark = pytest.mark.engines

POSITIONS = (
    # The chosen token, then the others: it is among them or not, first or last.
    ((5, -0.1), (5, -0.1), (6, -2.0), (7, -3.0), 1),
    ((9, -4.0), (5, -0.1), (6, -2.0), (7, -3.0), 12),
    ((7, -3.0), (5, -0.1), (6, -2.0), (7, -3.0), 3),
    ((6, -2.0), (5, -0.1), (6, -2.0), (7, -3.0), 2),
)


def outputs() -> list[Any]:
    """One output of vLLM for each position."""
    from vllm.logprobs import FlatLogprobs, append_logprobs_for_next_position
    from vllm.outputs import CompletionOutput, RequestOutput

    found = []
    for *entries, rank in POSITIONS:
        flat = FlatLogprobs()
        ids, values = zip(*entries, strict=True)
        append_logprobs_for_next_position(flat, list(ids), list(values), [None] * 4, rank, 3)
        completion = CompletionOutput(0, "", [ids[0]], None, flat)
        found.append(RequestOutput("0", None, [1], None, [completion], finished=False))
    return found


async def told(outputs: list[Any]) -> list[TokenLogprobs]:
    emitted: list[Output] = []
    request = make_request("0", Prompt.of(Tokens([1])), max_tokens=9, logprobs=3)
    tracker = VllmRequestTracker(request, emitted.append, "0", None)
    for output in outputs:
        assert tracker.take(output)
    return [entry for output in emitted for entry in output.logprobs]


@pytest.mark.parametrize("first", range(len(POSITIONS)))
async def test_logprobs_of_joined_outputs_are_those_of_single_ones(first: int) -> None:
    alone = await told(outputs()[first:])
    joined, *later = outputs()[first:]
    for output in later:
        joined.add(output, aggregate=True)
    assert await told([joined]) == alone
    assert [entry.logprob for entry in alone] == [each[0][1] for each in POSITIONS[first:]]
    for entry in alone:
        assert list(entry.top) == [(5, -0.1), (6, -2.0), (7, -3.0)]
