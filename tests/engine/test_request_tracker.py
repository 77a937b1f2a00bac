"""One request in vLLM or SGLang whose receiver fails."""

import pytest

from inlay.engine.request_tracker import RequestTracker
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import FinishReason, Output
from tests.engine.conformance import make_request


@pytest.mark.parametrize("reason", ["stop", None])
def test_a_request_whose_output_cannot_be_sent_ends_with_an_error(
    reason: FinishReason | None,
) -> None:
    taken: list[Output] = []

    def emit(output: Output) -> None:
        if output.token_ids:
            raise ValueError("too large")
        taken.append(output)

    tracker = RequestTracker(make_request("cut", Prompt.of(Tokens([1])), max_tokens=9), emit, "0")
    tracker.put((5,), (), None, reason)
    assert tracker.leaves()
    tracker.end("abort")
    (last,) = taken
    assert last.error is not None
    assert "could not be sent: ValueError: too large" in last.error.message
