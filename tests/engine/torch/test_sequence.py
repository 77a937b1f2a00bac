from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import EngineError
from inlay.engine.torch.sequence import Sequence
from inlay.messages.digest import Chain, Secret, chain, root_digest
from inlay.messages.prompt import Buffer, Prompt, Rows, Segment, Tokens
from inlay.messages.request import Request, Sampling

SECRET = Secret(bytes(32))
ROOT = root_digest(SECRET, weights_id="w", dtype="float32")
ROWS = Rows(Buffer(bytes(range(5))), "float8_e4m3fn", (5, 1))


def sequence(
    *segments: Segment, prior: tuple[int, ...] = (), cached: bool = True, **sampling: int
) -> Sequence:
    request = Request(
        id="x",
        attempt=2,
        prompts=(Prompt.of(*segments),),
        prior_output=prior,
        params=Sampling(**({"max_tokens": 9} | sampling)),  # type: ignore[arg-type]
    )
    return Sequence(request, arrival=0, chain=Chain(ROOT, SECRET) if cached else None)


def positions(one: Sequence, start: int, stop: int) -> list[int]:
    found: list[int] = []
    for first, segment in one.segments(start, stop):
        assert first == start + len(found)
        found.extend(segment.ids if isinstance(segment, Tokens) else bytes(segment.data.view))  # type: ignore[union-attr]
    return found


@given(start=st.integers(0, 20), stop=st.integers(0, 20))
def test_segments_are_the_positions_of_prompt_and_output_between_two_bounds(
    start: int, stop: int
) -> None:
    one = sequence(Tokens([90, 91, 92]), ROWS, Tokens([93]), prior=(70, 71))
    for token in range(60, 66):
        one.append(token)
    whole = [90, 91, 92, 0, 1, 2, 3, 4, 93, 70, 71, 60, 61, 62, 63, 64, 65]
    assert one.length == len(whole)
    assert positions(one, start, min(stop, one.length)) == whole[start:stop]


def test_page_digests_are_those_of_prompt_and_output_as_one_prompt() -> None:
    one = sequence(Tokens(range(40)), prior=(1, 2), max_tokens=99)
    for token in range(30):
        one.append(token)
    blocks = chain(Prompt.of(Tokens((*range(40), 1, 2, *range(30)))), ROOT, SECRET)
    assert [one.page_digest(index, 16) for index in range(5)] == [*blocks, None]
    assert [one.page_digest(index, 32) for index in range(3)] == [blocks[1], blocks[3], None]
    assert sequence(Tokens(range(40)), cached=False).page_digest(0, 16) is None


def test_an_output_ends_by_a_stop_token_before_it_ends_by_length() -> None:
    one = sequence(Tokens([1]), max_tokens=2)
    assert one.finish_reason((7,)) is None
    one.append(5)
    assert one.finish_reason((7,)) is None
    one.append(7)
    assert one.finish_reason((7,)) == "stop"
    assert one.finish_reason(()) == "length"


def test_outputs_carry_attempt_offset_and_usage_on_the_first_and_the_last() -> None:
    one = sequence(Tokens([1, 2, 3]), prior=(8,))
    one.append(5)
    first = one.make_output(new=1)
    assert (first.attempt, first.offset, first.token_ids) == (2, 1, (5,))
    assert first.usage is not None
    assert (first.usage.prompt_tokens, first.usage.completion_tokens) == (3, 2)
    one.append(6)
    assert one.make_output(new=1).usage is None
    last = one.make_output(error=EngineError("broken"))
    assert (last.offset, last.token_ids, last.finish_reason) == (3, (), "error")
    assert last.usage is not None
    assert last.error is not None
    assert last.error.message == "broken"


def test_digests_are_those_of_all_positions_however_often_they_are_asked_for() -> None:
    one, ids = sequence(Tokens(range(20)), max_tokens=200), list(range(30, 110))
    for id_ in ids:
        one.append(id_)
        if id_ % 7 == 0:
            one.page_digest((one.length - 1) // 16, 16)
    expected = chain(Prompt.of(Tokens([*range(20), *ids])), ROOT, SECRET)
    assert one.blocks(0, 99) == expected
    assert [one.page_digest(index, 32) for index in range(4)] == [*expected[1:6:2], None]
