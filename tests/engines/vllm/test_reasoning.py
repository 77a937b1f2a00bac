"""Structured output that begins after the model's reasoning, bound by vLLM itself."""

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.engine.api import GenerateEngine
from inlay.messages.prompt import Prompt, Tokens
from inlay.messages.request import Grammar
from tests.engine.conformance import ids, make_request, run
from tests.engine.reference import look_up, rows_of
from tests.equality.reference import tokenizer_of

SAID = ("lantern", "harbour")


def first_end(output: list[int], marks: list[int]) -> int | None:
    """End of the first run of `marks` in an output."""
    found = (
        end for end in range(len(marks), len(output) + 1) if output[end - len(marks) : end] == marks
    )
    return next(found, None)


@given(
    prompt=st.lists(st.integers(0, 2), max_size=5),
    steps=st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=3), max_size=8),
    after=st.lists(st.integers(0, 2), min_size=1, max_size=3),
)
def test_the_run_is_looked_for_in_the_output_alone_and_found_with_the_step_that_ends_it(
    prompt: list[int], steps: list[list[int]], after: list[int]
) -> None:
    from inlay.engine.vllm.reasoning import GrammarStart

    bounds = GrammarStart(None, after=after, start=len(prompt))
    output: list[int] = []
    for step in steps:
        before = len(output)
        output += step
        end = first_end(output, after)
        assert bounds.is_reasoning_end(prompt + output) == (end is not None)
        if end is None or end > before:
            assert bounds.is_reasoning_end_streaming(prompt + output, step) == (end is not None)


@pytest.mark.asyncio(loop_scope="session")
async def test_what_comes_before_is_free_and_what_follows_matches(
    shared: GenerateEngine, directory: Path
) -> None:
    tokenizer: Any = tokenizer_of(directory)
    rows = rows_of(look_up(directory, ids(4, 20)))
    choice = json.dumps(SAID)
    for prompt in (Prompt.of(Tokens(ids(3, 9))), Prompt.of(rows, Tokens(ids(5, 7)))):
        (free,) = await run(shared, make_request("free", prompt, 20))
        marks = free.output[6:8]
        absent = next(id_ for id_ in range(3, 300) if id_ not in free.output)
        end = first_end(free.output, marks)
        bound, held, never, beside = await run(
            shared,
            make_request("bound", prompt, 40, grammar=Grammar("choice", choice), ignore_eos=False),
            make_request(
                "held",
                prompt,
                40,
                grammar=Grammar("choice", choice, after=tuple(marks)),
                ignore_eos=False,
            ),
            make_request("never", prompt, 20, grammar=Grammar("choice", choice, after=(absent,))),
            make_request("beside", prompt, 20),
        )
        assert tokenizer.decode(bound.output, skip_special_tokens=True) in SAID
        assert held.output[:end] == free.output[:end]
        assert tokenizer.decode(held.output[end:], skip_special_tokens=True) in SAID
        assert held.last.finish_reason == "stop"
        assert never.output == beside.output == free.output
