"""Cutting what an engine says changes nothing of it."""

from array import array
from typing import Any

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from inlay.base.errors import EngineError, ErrorFrame
from inlay.messages.outputs import coalesce, drop_known, slice_prompt_logprobs, trim_to_offset
from inlay.messages.prompt import Buffer
from inlay.messages.request import (
    EngineUsage,
    FinishReason,
    Output,
    Payload,
    PromptLogprobs,
    TokenLogprobs,
)


def scores(start: int, count: int, top: int) -> PromptLogprobs:
    width = 1 + top
    return PromptLogprobs(
        start,
        array("i", range(count * width)).tobytes(),
        array("f", range(count * width)).tobytes(),
        array("i", range(count)).tobytes(),
    )


def test_whatever_an_output_has_besides_tokens_is_seen() -> None:
    tokens = {"request_id", "attempt", "offset", "token_ids", "logprobs"}
    # The id that ended an output comes with a finish reason.
    others = set(Output.__struct_fields__) - tokens - {"stop_token_id"}
    plain = Output("w", 1, 5, (7,), (TokenLogprobs(-1.0),))
    assert plain.only_tokens
    for name in others:
        something: Any = object()
        assert not replace(plain, **{name: something}).only_tokens, name


@given(offset=st.integers(0, 9), count=st.integers(1, 9), skipped=st.integers(0, 9))
def test_ids_that_were_shown_are_left_out(offset: int, count: int, skipped: int) -> None:
    output = Output(
        "w", 0, offset, tuple(range(count)), tuple(TokenLogprobs(float(n)) for n in range(count))
    )
    at = min(offset + skipped, offset + count)
    rest = trim_to_offset(output, at)
    assert rest.offset == max(at, offset)
    assert rest.token_ids == output.token_ids[at - offset :]
    assert [one.logprob for one in rest.logprobs] == list(map(float, rest.token_ids))


@given(count=st.integers(1, 9), top=st.integers(0, 3), position=st.integers(0, 20))
def test_prompt_logprobs_that_were_told_are_left_out(count: int, top: int, position: int) -> None:
    told = scores(4, count, top)
    rest = drop_known(told, position)
    if position >= 4 + count:
        assert rest is None
    else:
        assert rest == slice_prompt_logprobs(told, max(0, position - 4), count)
        assert rest.start == max(4, position)


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    with_logprobs=st.sets(st.integers(0, 7)),
    told=st.sets(st.integers(0, 7)),
    resumed=st.integers(0, 5),
    reason=st.sampled_from([None, "stop", "length", "abort"]),
)
def test_joined_outputs_say_the_same_in_the_same_order(
    sizes: list[int],
    with_logprobs: set[int],
    told: set[int],
    resumed: int,
    reason: FinishReason | None,
) -> None:
    outputs, offset = [], resumed
    for index, size in enumerate(sizes):
        ids = tuple(range(offset, offset + size))
        last = index == len(sizes) - 1
        outputs.append(
            Output(
                "w",
                1,
                offset,
                ids,
                tuple(TokenLogprobs(-float(id_)) for id_ in ids) if index in with_logprobs else (),
                reason if last else None,
                7 if last and reason == "stop" else None,
                EngineUsage(3, offset + size) if index in told else None,
            )
        )
        offset += size
    fewer = coalesce(outputs)
    assert [id_ for output in fewer for id_ in output.token_ids] == list(range(resumed, offset))
    assert [output.offset + len(output.token_ids) for output in fewer[:-1]] == [
        output.offset for output in fewer[1:]
    ]
    assert [one for output in fewer for one in output.logprobs] == [
        one for output in outputs for one in output.logprobs
    ]
    assert all(len(output.logprobs) in (0, len(output.token_ids)) for output in fewer)
    assert [output.finish_reason for output in fewer] == [None] * (len(fewer) - 1) + [reason]
    assert fewer[-1].stop_token_id == outputs[-1].stop_token_id
    usages = [output.usage for output in outputs if output.usage is not None]
    assert [output.usage for output in fewer if output.usage is not None][-1:] == usages[-1:]
    if not with_logprobs and reason != "abort":
        assert len(fewer) == 1


def test_what_does_not_follow_is_not_joined() -> None:
    first = Output("w", 1, 0, (1, 2))
    for second in (
        Output("w", 1, 3, (4,)),
        Output("w", 1, 1, (2,)),
        Output("w", 2, 2, (3,)),
        Output("w", 1, 2, (3,), finish_reason="abort"),
        Output("w", 1, 2, finish_reason="error", error=ErrorFrame.of(EngineError("no"))),
        Output("w", 1, 2, prompt_logprobs=scores(0, 1, 0)),
        Output("w", 1, 2, payloads=(Payload("logits", "float32", (0, 2), Buffer(b"")),)),
    ):
        assert coalesce([first, second]) == [first, second]
