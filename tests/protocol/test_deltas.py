"""Cutting what an engine says changes nothing of it."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from inlay.protocol.deltas import after, halves, sliced, untold
from inlay.protocol.work import Delta, PromptLogprobs, TokenLogprobs, Usage


def scores(start: int, count: int, top: int) -> PromptLogprobs:
    width = 1 + top
    return PromptLogprobs(
        start,
        array("i", range(count * width)).tobytes(),
        array("f", range(count * width)).tobytes(),
        array("i", range(count)).tobytes(),
    )


def pieces(delta: Delta) -> list[Delta]:
    cut = halves(delta)
    return [delta] if cut is None else [*pieces(cut[0]), *pieces(cut[1])]


@given(
    offset=st.integers(0, 9),
    count=st.integers(0, 9),
    prompt=st.integers(0, 9),
    top=st.integers(0, 3),
    logprobs=st.booleans(),
)
def test_the_parts_of_a_delta_say_the_same_in_the_same_order(
    offset: int, count: int, prompt: int, top: int, logprobs: bool
) -> None:
    whole = Delta(
        "w",
        2,
        offset,
        tuple(range(count)),
        tuple(TokenLogprobs(-float(n)) for n in range(count)) if logprobs else (),
        "stop",
        7,
        Usage(5, offset + count),
        prompt_logprobs=scores(3, prompt, top) if prompt else None,
    )
    parts = pieces(whole)
    assert all(len(part.token_ids) <= 1 for part in parts)
    assert tuple(id_ for part in parts for id_ in part.token_ids) == whole.token_ids
    assert tuple(one for part in parts for one in part.logprobs) == whole.logprobs
    assert [part.offset for part in parts if part.token_ids] == list(range(offset, offset + count))
    told = [part.prompt_logprobs for part in parts if part.prompt_logprobs is not None]
    assert [one.start for one in told] == list(range(3, 3 + prompt))
    if whole.prompt_logprobs is not None:
        for name in ("ids", "logprobs", "ranks"):
            assert b"".join(getattr(one, name) for one in told) == getattr(whole.prompt_logprobs, name)
    assert [part.finish_reason for part in parts[:-1]] == [None] * (len(parts) - 1)
    assert (parts[-1].finish_reason, parts[-1].stop_token_id, parts[-1].usage) == (
        "stop",
        7,
        whole.usage,
    )
    first_id = next((i for i, part in enumerate(parts) if part.token_ids), len(parts))
    assert all(part.prompt_logprobs is None for part in parts[first_id + 1 :])


@given(offset=st.integers(0, 9), count=st.integers(1, 9), skipped=st.integers(0, 9))
def test_ids_that_were_shown_are_left_out(offset: int, count: int, skipped: int) -> None:
    delta = Delta("w", 0, offset, tuple(range(count)), tuple(TokenLogprobs(float(n)) for n in range(count)))
    at = min(offset + skipped, offset + count)
    rest = after(delta, at)
    assert rest.offset == max(at, offset)
    assert rest.token_ids == delta.token_ids[at - offset :]
    assert [one.logprob for one in rest.logprobs] == list(map(float, rest.token_ids))


@given(count=st.integers(1, 9), top=st.integers(0, 3), position=st.integers(0, 20))
def test_prompt_logprobs_that_were_told_are_left_out(count: int, top: int, position: int) -> None:
    told = scores(4, count, top)
    rest = untold(told, position)
    if position >= 4 + count:
        assert rest is None
    else:
        assert rest == sliced(told, max(0, position - 4), count)
        assert rest.start == max(4, position)
