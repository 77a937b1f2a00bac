"""A prompt behaves as the sequence of its positions."""

from itertools import pairwise

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Buffer, Media, Prompt, Rows, Segment, Tokens, split_point
from tests.strategies import prompts, segments


def positions(prompt: Prompt) -> list[object]:
    """The element at each position, however the segments are cut."""
    found: list[object] = []
    for segment in prompt.segments:
        if isinstance(segment, Tokens):
            found.extend(segment.ids)
        else:
            for index in range(len(segment)):
                one = segment.slice(index, index + 1)
                found.append(
                    (bytes(one.data.view), one.dtype, tuple(bytes(f.data.view) for f in one.bundle))
                    if isinstance(one, Rows)
                    else (one.digest, one.start)
                )
    return found


@given(prompts, st.data())
def test_a_slice_holds_the_positions_of_its_range(prompt: Prompt, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(prompt)))
    stop = data.draw(st.integers(start, len(prompt)))
    part = prompt.slice(start, stop)
    assert len(part) == stop - start
    assert positions(part) == positions(prompt)[start:stop]


@given(prompts, prompts)
def test_joining_prompts_joins_their_positions(left: Prompt, right: Prompt) -> None:
    assert positions(left + right) == positions(left) + positions(right)
    assert len(left + right) == len(left) + len(right)


@given(prompts, st.data())
def test_slices_joined_again_are_the_prompt_and_share_its_memory(
    prompt: Prompt, data: st.DataObject
) -> None:
    cut = data.draw(st.integers(0, len(prompt)))
    assert positions(prompt.slice(0, cut) + prompt.slice(cut, len(prompt))) == positions(prompt)
    for segment in prompt.slice(cut, len(prompt)).segments:
        if isinstance(segment, Rows):
            assert any(
                isinstance(whole, Rows) and segment.data.view.obj is whole.data.view.obj
                for whole in prompt.segments
            )


@given(st.lists(segments, max_size=6))
def test_the_normal_form_has_no_empty_segment_and_no_neighbouring_tokens(
    parts: list[Segment],
) -> None:
    prompt = Prompt.of(Tokens([]), *parts, Tokens([]))
    assert all(len(segment) for segment in prompt.segments)
    kinds = [isinstance(segment, Tokens) for segment in prompt.segments]
    assert not any(a and b for a, b in pairwise(kinds))


@given(prompts, st.data())
def test_spans_name_the_first_position_of_each_part(prompt: Prompt, data: st.DataObject) -> None:
    start = data.draw(st.integers(0, len(prompt)))
    stop = data.draw(st.integers(start, len(prompt)))
    position = start
    for first, segment in prompt.spans(start, stop):
        assert first == position
        position += len(segment)
    assert position == stop


def test_token_ids_leave_rows_out() -> None:
    row = Rows(Buffer(bytes(8)), "float32", (1, 2))
    assert Prompt.of(Tokens([1, 2]), row, Tokens([3])).token_ids() == (1, 2, 3)
    assert Prompt.of(Tokens([1]), row).has_rows
    assert not Prompt.of(Tokens([1])).has_rows


def test_a_cut_never_falls_inside_an_atomic_segment() -> None:
    image = Media("image", bytes(16), 5, atomic=True)
    prompt = Prompt.of(Tokens([1, 2]), image, Tokens([3, 4]), image)
    bounds = prompt.atomic_bounds()
    assert bounds == [(2, 7), (9, 14)]
    cuts = [split_point(bounds, position) for position in range(15)]
    assert cuts == [0, 1, 2, 2, 2, 2, 2, 7, 8, 9, 9, 9, 9, 9, 14]


@pytest.mark.parametrize(
    ("size", "dtype", "shape"),
    [
        (7, "float32", (1, 2)),
        (8, "int8", (1, 2)),
        (8, "float32", (2, 2)),
        (0, "float32", (0, 0)),
        (8, "float32", (-1, -2)),
    ],
)
def test_rows_whose_bytes_do_not_fit_their_shape_are_refused(
    size: int, dtype: str, shape: tuple[int, int]
) -> None:
    with pytest.raises(InvalidRequestError):
        Rows(Buffer(bytes(size)), dtype, shape)


def test_prompts_are_immutable() -> None:
    prompt = Prompt.of(Tokens([1]))
    with pytest.raises(AttributeError, match="immutable"):
        prompt.segments = ()  # type: ignore[misc]
    with pytest.raises(TypeError):
        Buffer(bytearray(4)).view[0] = 1
    assert msgspec.structs.replace(prompt, segments=()) != prompt
