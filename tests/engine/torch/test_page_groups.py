"""Layers are grouped so that windows save memory; a sequence's pages follow from its window."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from inlay.engine.torch.cache.kv_layout import (
    MAX_GROUPS,
    MAX_PLACES,
    PageGroup,
    first_page,
    group_layers,
    most_pages,
    pages_for,
)
from inlay.engine.torch.windows import Chunk, Window, size_of


def sizes(windows: list[int | None], max_model_len: int = 32768) -> list[tuple[Window, int]]:
    return [(group.window, len(group.layers)) for group in group_layers(windows, max_model_len)]


def test_layers_without_windows_are_one_group() -> None:
    assert group_layers([None] * 3, 512) == (PageGroup(None, (0, 1, 2)),)


def test_layers_of_one_window_are_one_group() -> None:
    assert group_layers([24, 24], 512) == (PageGroup(24, (0, 1)),)


def test_windows_that_hold_the_longest_sequence_are_none() -> None:
    assert sizes([4096, 4096], 4096) == [(None, 2)]
    assert sizes([None, 4096], 2048) == [(None, 2)]


def test_layers_that_take_turns_are_two_groups() -> None:
    assert group_layers([128, None] * 2, 4096) == (PageGroup(None, (1, 3)), PageGroup(128, (0, 2)))


def test_five_windows_to_one_full_layer_are_groups_of_as_many_layers_as_are_full() -> None:
    layers = [None if layer % 6 == 5 else 512 for layer in range(26)]
    assert sizes(layers) == [(None, 4), *[(512, 4)] * 5, (512, 2)]


def test_unused_places_are_few_or_windows_are_not_used() -> None:
    assert sizes([None] * 31 + [512]) == [(None, 32)]
    assert sizes([None] * 25 + [512] * 3) == [*[(None, 5)] * 5, (512, 3)]


@given(
    windows=st.lists(
        st.sampled_from([None, None, 16, Chunk(100), 512, 5000]), min_size=1, max_size=40
    ),
    max_model_len=st.sampled_from([64, 512, 4096, 100_000]),
)
def test_each_layer_is_in_one_group_that_keeps_what_it_sees_and_memory_is_not_wasted(
    windows: list[Window], max_model_len: int
) -> None:
    groups = group_layers(windows, max_model_len)
    assert sorted(layer for group in groups for layer in group.layers) == list(range(len(windows)))
    for group in groups:
        for layer in group.layers:
            assert group.window is None or group.window == windows[layer]
    widest = max(len(group.layers) for group in groups)
    assert len(groups) <= MAX_GROUPS
    assert widest * len(groups) <= MAX_PLACES * len(windows)
    taken = sum(
        widest * min(size_of(group.window) or max_model_len, max_model_len) for group in groups
    )
    assert taken <= len(windows) * max_model_len


@pytest.mark.parametrize(
    ("window", "computed", "first"),
    [
        (None, 1000, 0),
        (24, 0, 0),
        (24, 23, 0),
        (24, 38, 0),
        (24, 39, 1),
        (1, 15, 0),
        (1, 16, 1),
        (Chunk(40), 79, 2),
        (Chunk(40), 80, 5),
    ],
)
def test_a_page_is_needed_until_no_later_position_sees_it(
    window: Window, computed: int, first: int
) -> None:
    assert first_page(window, computed, 16) == first


@given(
    window=st.integers(1, 100),
    start=st.integers(0, 300),
    chunk=st.integers(1, 70),
    page_size=st.sampled_from([16, 32]),
)
def test_the_most_pages_are_never_exceeded_and_sometimes_reached(
    window: int, start: int, chunk: int, page_size: int
) -> None:
    length = start + chunk
    held = pages_for(length, page_size) - first_page(window, start, page_size)
    assert held <= most_pages(window, length, chunk, page_size) <= pages_for(length, page_size)
    most = most_pages(window, 10_000, chunk, page_size)
    assert most == max(
        pages_for(at + chunk, page_size) - first_page(window, at, page_size)
        for at in range(500, 500 + page_size)
    )
