"""Rope positions against transformers' `get_rope_index`, for random mixtures."""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.models.glm4v.modeling_glm4v import Glm4vModel
from transformers.models.qwen2_5_omni.modeling_qwen2_5_omni import (
    Qwen2_5OmniThinkerModel as Omni,
)
from transformers.models.qwen2_5_vl.modeling_qwen2_5_vl import Qwen2_5_VLModel
from transformers.models.qwen2_vl.modeling_qwen2_vl import Qwen2VLModel
from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5Model
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel

from inlay.base.errors import InvalidRequestError
from inlay.media.positions import (
    grid_field,
    grid_positions,
    line_field,
    media_runs,
    merged,
    rope_positions,
)
from inlay.messages.prompt import Buffer, Media, Prompt, RowField, Rows, Segment, Tokens
from tests.examples import examples

MERGE = 2
TOKENS_PER_SECOND = 4

sides = st.integers(1, 6).map(lambda side: side * MERGE)
grids = st.tuples(st.integers(1, 5), sides, sides)
images = st.tuples(st.just("image"), st.tuples(st.just(1), sides, sides), st.just(1.0))
videos = st.tuples(st.just("video"), grids, st.sampled_from([1.0, 0.5, 0.1, 2.0, 1 / 3, 0.04]))
mixtures = st.lists(st.tuples(st.integers(1, 9), st.one_of(images, videos)), min_size=1, max_size=5)


def theirs(
    model: Any, *, tokens_per_second: int = TOKENS_PER_SECOND, **arguments: Any
) -> tuple[torch.Tensor, int]:
    """Positions (3, T) and delta, by the model's own method without its weights."""
    vision = SimpleNamespace(spatial_merge_size=MERGE, tokens_per_second=tokens_per_second)

    class Bare:
        config = SimpleNamespace(vision_config=vision)
        get_vision_position_ids = model.get_vision_position_ids

    positions, deltas = model.get_rope_index(Bare(), **arguments)
    return positions[:, 0], int(deltas[0, 0])


def rows_of(grid: tuple[int, int, int]) -> int:
    return grid[0] * grid[1] * grid[2] // MERGE**2


def segments_of(
    kind: str, grid: tuple[int, int, int], split: bool, interval: float
) -> list[Segment]:
    total = rows_of(grid)
    if not split or kind == "image":
        return [Media(kind, bytes(16), total, grid=grid, interval=interval)]
    frame = total // grid[0]
    found: list[Segment] = []
    for time in range(grid[0]):
        found.append(Media(kind, bytes(16), frame, grid=grid, start=time * frame, total=total))
        found.append(Tokens([7] * (time + 1)))
    return found


@pytest.mark.parametrize(
    ("model", "split", "timed"),
    [
        (Qwen2VLModel, False, False),
        (Qwen2_5_VLModel, False, True),
        (Qwen3VLModel, True, False),
        (Qwen3_5Model, True, False),
        (Glm4vModel, True, False),
    ],
    ids=["qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_5", "glm4v"],
)
@settings(deadline=None, max_examples=examples(120))
@given(mixtures, st.integers(0, 5))
def test_positions_are_those_of_transformers(
    model: Any, split: bool, timed: bool, mixture: Any, tail: int
) -> None:
    prompt: list[Segment] = []
    seconds: list[float] = []
    found: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    for text, (kind, grid, second) in mixture:
        interval = 1.0
        if kind == "video" and timed:
            seconds.append(second)
            interval = float(np.float32(TOKENS_PER_SECOND) * np.float32(second))
        prompt += [Tokens([7] * text), *segments_of(kind, grid, split, interval)]
        found[kind].append(grid)
    prompt.append(Tokens([7] * tail))
    whole = Prompt.of(*prompt)
    types = [
        kind
        for segment in whole.segments
        for kind in [{"image": 1, "video": 2}.get(getattr(segment, "kind", ""), 0)] * len(segment)
    ]
    grid_of: Callable[[str], torch.Tensor | None] = lambda kind: (  # noqa: E731
        torch.tensor(found[kind]) if found[kind] else None
    )
    timing: dict[str, Any] = {}
    if timed and seconds:
        timing["second_per_grid_ts"] = torch.tensor(seconds)
    wanted, delta = theirs(
        model,
        input_ids=torch.zeros((1, len(whole)), dtype=torch.long),
        mm_token_type_ids=torch.tensor([types]),
        image_grid_thw=grid_of("image"),
        video_grid_thw=grid_of("video"),
        **timing,
    )
    ours, our_delta = rope_positions(whole)
    assert ours.dtype == np.int32
    assert ours.tolist() == wanted.tolist()
    assert our_delta == delta


AUDIO, VISION = (1, 2), (3, 4)
"""Ids around what is heard or seen."""
ROWS = {"audio": 5, "image": 6, "video": 7}

sounds = st.tuples(st.just("audio"), st.integers(1, 90), st.just(1.0))
clips = st.tuples(
    st.just("video"), grids, st.sampled_from([1.0, 0.5, 2 / 0.6, 2 / 0.15, 2 / 29.97])
)
heard_and_seen = st.lists(
    st.tuples(st.integers(1, 9), st.one_of(images, clips, sounds)), min_size=1, max_size=6
)


@settings(deadline=None, max_examples=examples(150))
@given(heard_and_seen, st.integers(0, 5))
def test_positions_by_the_clock_are_those_of_transformers(mixture: Any, tail: int) -> None:
    prompt: list[Segment] = []
    grids_: dict[str, list[tuple[int, int, int]]] = {"image": [], "video": []}
    seconds: list[float] = []
    frames: list[int] = []
    for text, (kind, size, second) in mixture:
        before, after = AUDIO if kind == "audio" else VISION
        if kind == "audio":
            frames.append(4 * size)
            run = Media(kind, bytes(16), size)
        else:
            timing: dict[str, Any] = {}
            if kind == "video":
                seconds.append(second)
                timing = {"interval": float(np.float32(second)), "rate": 25.0}
            grids_[kind].append(size)
            run = Media(kind, bytes(16), rows_of(size), grid=size, **timing)
        prompt += [Tokens([9] * text + [before]), run, Tokens([after])]
    whole = Prompt.of(*prompt, Tokens([9] * tail))
    ids = [
        id_
        for segment in whole.segments
        for id_ in (
            segment.ids
            if isinstance(segment, Tokens)
            else [ROWS[getattr(segment, "kind", "")]] * len(segment)
        )
    ]

    class Bare:
        config = SimpleNamespace(
            **{f"{kind}_token_id": id_ for kind, id_ in ROWS.items()},
            vision_start_token_id=VISION[0],
            audio_start_token_id=AUDIO[0],
            position_id_per_seconds=25,
            seconds_per_chunk=2,
        )
        spatial_merge_size = MERGE
        get_llm_pos_ids_for_vision = Omni.get_llm_pos_ids_for_vision

    wanted, delta = Omni.get_rope_index(
        Bare(),
        input_ids=torch.tensor([ids]),
        image_grid_thw=torch.tensor(grids_["image"]) if grids_["image"] else None,
        video_grid_thw=torch.tensor(grids_["video"]) if grids_["video"] else None,
        attention_mask=torch.ones(1, len(ids), dtype=torch.long),
        audio_seqlens=torch.tensor(frames),
        second_per_grids=torch.tensor(seconds),
    )
    ours, our_delta = rope_positions(whole)
    assert ours.tolist() == wanted[:, 0].tolist()
    assert our_delta == int(delta[0, 0])
    # The runs alone, from whatever position on, say the same.
    runs = media_runs(whole, 3)
    rebuilt: list[Segment] = []
    at = 0
    for start, run in runs:
        rebuilt += [Tokens([0] * (start - 3 - at)), run]
        at = start - 3 + len(run)
    rebuilt.append(Tokens([0] * (len(whole) - at)))
    assert rope_positions(Prompt.of(*rebuilt))[0].tolist() == ours.tolist()


def test_rows_that_a_client_made_are_runs_of_media() -> None:
    def rows(count: int, *fields: RowField) -> Rows:
        return Rows(Buffer(bytes(4 * count)), "float32", (count, 1), fields)

    prompt = Prompt.of(
        Tokens([1, 2]), rows(6, grid_field(2, 3)), rows(2), rows(4, line_field(4)), Tokens([3])
    )
    (seen_at, seen), (heard_at, heard) = media_runs(prompt)
    assert (seen_at, seen.kind, seen.grid, len(seen)) == (2, "image", (1, 2, 3), 6)
    assert (heard_at, heard.kind, heard.grid, len(heard)) == (10, "audio", None, 4)
    picture = Media("image", bytes(16), 6, grid=(1, 4, 6))
    sound = Media("audio", bytes(16), 4)
    same = Prompt.of(Tokens([1, 2]), picture, Tokens([5, 5]), sound, Tokens([3]))
    assert rope_positions(prompt)[0].tolist() == rope_positions(same)[0].tolist()


def test_a_prompt_of_tokens_has_plain_positions() -> None:
    for length in (0, 1, 5):
        found, delta = rope_positions(Prompt.of(Tokens(range(length))))
        assert found.tolist() == [list(range(length))] * 3
        assert delta == 0


@given(sides, sides, st.integers(1, 3))
def test_rows_with_a_grid_are_numbered_as_the_picture_they_stand_for(
    height: int, width: int, text: int
) -> None:
    lines, columns = height // MERGE, width // MERGE
    count = lines * columns
    rows = Rows(Buffer(bytes(4 * count)), "float32", (count, 1), (grid_field(lines, columns),))
    picture = Media("image", bytes(16), count, grid=(1, height, width))
    plain = Rows(Buffer(bytes(8)), "float32", (2, 1))
    for before in (Tokens([1] * text), plain):
        pair = [rope_positions(Prompt.of(before, item, Tokens([2]))) for item in (rows, picture)]
        assert pair[0][0].tolist() == pair[1][0].tolist()
        assert pair[0][1] == pair[1][1]


def test_rows_that_do_not_fill_their_grid_are_refused() -> None:
    for rows in (0, 3, 5, 16, 10**9):
        with pytest.raises(InvalidRequestError, match="patches has"):
            merged((1, 4, 4), rows) if rows != 16 else merged((1, 4, 5), rows)
    assert merged((2, 4, 6), 12) == (2, 2, 3)
    assert merged((1, 4, 6), 24) == (1, 4, 6)
    cut = Media("image", bytes(16), 3, grid=(1, 4, 4), total=4)
    with pytest.raises(InvalidRequestError, match="no whole number of frames"):
        rope_positions(Prompt.of(cut))
    wrong = RowField("grid", Buffer(bytes(8)), "int32", (1, 2))
    with pytest.raises(InvalidRequestError, match=r"must be int32 \(1, 3\)"):
        rope_positions(Prompt.of(Rows(Buffer(bytes(4)), "float32", (1, 1), (wrong,))))


def test_a_grid_counts_columns_first() -> None:
    assert grid_positions(2, 3, 2, 2.5).tolist() == [
        [0, 0, 0, 0, 0, 0, 2, 2, 2, 2, 2, 2],
        [0, 0, 0, 1, 1, 1, 0, 0, 0, 1, 1, 1],
        [0, 1, 2, 0, 1, 2, 0, 1, 2, 0, 1, 2],
    ]
