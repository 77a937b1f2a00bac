"""Cutting what an engine says changes nothing of it."""

from array import array

from hypothesis import given
from hypothesis import strategies as st

from inlay.errors import EngineError, ErrorFrame
from inlay.protocol.deltas import after, halves, joined, sliced, untold
from inlay.protocol.work import Delta, FinishReason, PromptLogprobs, TokenLogprobs, Usage


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


@given(
    sizes=st.lists(st.integers(0, 4), min_size=1, max_size=8),
    with_logprobs=st.sets(st.integers(0, 7)),
    told=st.sets(st.integers(0, 7)),
    resumed=st.integers(0, 5),
    reason=st.sampled_from([None, "stop", "length", "abort"]),
)
def test_joined_deltas_say_the_same_in_the_same_order(
    sizes: list[int], with_logprobs: set[int], told: set[int], resumed: int, reason: FinishReason | None
) -> None:
    deltas, offset = [], resumed
    for index, size in enumerate(sizes):
        ids = tuple(range(offset, offset + size))
        last = index == len(sizes) - 1
        deltas.append(
            Delta(
                "w",
                1,
                offset,
                ids,
                tuple(TokenLogprobs(-float(id_)) for id_ in ids) if index in with_logprobs else (),
                reason if last else None,
                7 if last and reason == "stop" else None,
                Usage(3, offset + size) if index in told else None,
            )
        )
        offset += size
    fewer = joined(deltas)
    assert [id_ for delta in fewer for id_ in delta.token_ids] == list(range(resumed, offset))
    assert [delta.offset + len(delta.token_ids) for delta in fewer[:-1]] == [
        delta.offset for delta in fewer[1:]
    ]
    assert [one for delta in fewer for one in delta.logprobs] == [
        one for delta in deltas for one in delta.logprobs
    ]
    assert all(len(delta.logprobs) in (0, len(delta.token_ids)) for delta in fewer)
    assert [delta.finish_reason for delta in fewer] == [None] * (len(fewer) - 1) + [reason]
    assert fewer[-1].stop_token_id == deltas[-1].stop_token_id
    usages = [delta.usage for delta in deltas if delta.usage is not None]
    assert [delta.usage for delta in fewer if delta.usage is not None][-1:] == usages[-1:]
    if not with_logprobs and reason != "abort":
        assert len(fewer) == 1


def test_what_does_not_follow_is_not_joined() -> None:
    first = Delta("w", 1, 0, (1, 2))
    for second in (
        Delta("w", 1, 3, (4,)),
        Delta("w", 1, 1, (2,)),
        Delta("w", 2, 2, (3,)),
        Delta("w", 1, 2, (3,), finish_reason="abort"),
        Delta("w", 1, 2, finish_reason="error", error=ErrorFrame.of(EngineError("no"))),
        Delta("w", 1, 2, prompt_logprobs=scores(0, 1, 0)),
    ):
        assert joined([first, second]) == [first, second]
