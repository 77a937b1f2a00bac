"""Embeddings that clients made: vLLM's JSON forms, and what no engine may see."""

import base64
import functools
import io
import tracemalloc
from typing import Any

import numpy as np
import pytest
import torch

from inlay.base.errors import EmbeddingsError, InvalidRequestError
from inlay.media.embeds import embeds_segments, parse_embeds, read_grid
from inlay.media.positions import rope_positions
from inlay.media.spec import MediaSpec, layout, media_segments
from inlay.messages.digest import Secret, row_digests
from inlay.messages.prompt import Media, Prompt, Rows, Tokens
from inlay.tensors import read
from inlay.tensors.integers import read_integers
from tests.media import processors

HIDDEN = 4


def saved(value: torch.Tensor) -> bytes:
    out = io.BytesIO()
    torch.save(value, out)
    return out.getvalue()


def base64_of(value: torch.Tensor) -> str:
    return base64.b64encode(saved(value)).decode()


def npy(value: Any) -> str:
    out = io.BytesIO()
    np.save(out, value)
    return base64.b64encode(out.getvalue()).decode()


@functools.cache
def spec_of(family: str) -> MediaSpec:
    return {
        "qwen2_vl": lambda: processors.qwen2_vl("qwen2_vl", 14, 3136, 12845056),
        "qwen3_vl": lambda: processors.qwen2_vl("qwen3_vl", 16, 65536, 16777216),
        "llava": lambda: processors.llava(56),
        "llava_next": lambda: processors.llava_next(16, 4, [[16, 32], [32, 16]]),
        "gemma3": lambda: processors.gemma3(9),
        "gemma4": lambda: processors.gemma4(4, 70),
        "internvl": lambda: processors.internvl(16, 5, 3),
        "mistral3": lambda: processors.pixtral("mistral3", 14, 2, 1540),
        "smolvlm": lambda: processors.idefics3("smolvlm", 100, 24, 5),
        "llama4": lambda: processors.llama4(56, 7),
    }[family]().spec


def made(
    family: str,
    rows: int,
    grid: tuple[int, int, int] | None = None,
    width: int = HIDDEN,
    **more: Any,
) -> list[Any]:
    values = more.pop("values", torch.arange(1.0, rows * width + 1).reshape(rows, width))
    return embeds_segments(
        spec_of(family), read(saved(values)), grid=grid, hidden_size=HIDDEN, dtype="float32", **more
    )


@pytest.mark.parametrize(
    "value",
    [
        [1, 8, 6],
        [[1, 8, 6]],
        base64_of(torch.tensor([1, 8, 6])),
        base64_of(torch.tensor([[1, 8, 6]], dtype=torch.int32)),
        base64_of(torch.tensor([[9, 1, 8, 6]])[:, 1:]),
        npy(np.array([1, 8, 6])),
        npy(np.array([[1, 8, 6]], np.int32)),
    ],
)
def test_a_grid_is_numbers_or_a_tensor_of_them(value: object) -> None:
    assert read_grid(value) == (1, 8, 6)
    found = parse_embeds({"image_embeds": "AAAA", "image_grid_thw": value})
    assert found == ("AAAA", (1, 8, 6))
    assert parse_embeds("AAAA") == ("AAAA", None)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        ([1, 8], "three integers from 1"),
        ([1, 8, 0], "three integers from 1"),
        ([1, 8, -6], "three integers from 1"),
        ([1, 8, 2**31], "three integers from 1"),
        ([1, 8, 6.0], "neither"),
        ([1, 8, True], "neither"),
        ([[1, 8, 6], [1, 8, 6]], "neither"),
        ({"a": 1}, "neither"),
        (5, "neither"),
        ("!", "base64"),
        ("AAAA", "no known format"),
        ("A" * 200_000, "200000 characters"),
        (base64_of(torch.tensor([1.0, 8.0, 6.0])), "float32 where integers belong"),
        (base64_of(torch.tensor([1, 8, 6, 7])), "3 integers belong"),
        (base64_of(torch.tensor([1, 8]).expand(9, 2)), "stride 0"),
        (npy(np.array([1.0, 8.0, 6.0])), "dtype '<f8'"),
        (npy(np.array(["a"], object)), "dtype '|O'"),
    ],
)
def test_any_other_grid_is_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidRequestError) as caught:
        read_grid(value)
    assert message in caught.value.message
    assert caught.value.param == "image_grid_thw"


def test_tensors_of_integers_are_still_no_rows() -> None:
    for dtype, name in ((torch.int64, "long"), (torch.int32, "int")):
        with pytest.raises(EmbeddingsError, match=f"dtype '{name}'"):
            read(saved(torch.ones((3, 4), dtype=dtype)))
    with pytest.raises(EmbeddingsError, match="99999 bytes for 3 integers"):
        read_integers(bytes(99_999), count=3)


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (None, "are not kept by their uuid"),
        ({}, "got no 'image_embeds'"),
        ({"image_embeds": None}, "got no 'image_embeds'"),
        ({"image_embeds": "A", "image_sizes": 1}, "got 'image_sizes'"),
    ],
)
def test_an_object_without_embeddings_is_refused(value: object, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        parse_embeds(value)


def test_rows_of_a_grid_have_the_positions_of_the_picture() -> None:
    spec = spec_of("qwen2_vl")
    laid = layout(spec, 112, 168)
    assert laid.grid is not None
    segments = made("qwen2_vl", laid.rows, laid.grid)
    positions, delta = rope_positions(Prompt.of(Tokens([1, 2]), *segments, Tokens([3])))
    assert positions[:, 2].tolist() == [2, 2, 2]
    assert positions[:, 2 + laid.rows - 1].tolist() == [2, 5, 7]
    assert delta == 6 - laid.rows
    secret = Secret(bytes(32))
    turned = made("qwen2_vl", laid.rows, (1, laid.grid[2], laid.grid[1]))
    assert row_digests(segments[0], secret) != row_digests(turned[0], secret)


def test_inner_features_come_after_the_rows_in_one_tensor() -> None:
    values = torch.arange(float(4 * 4 * HIDDEN)).reshape(1, 4, 4 * HIDDEN)
    (rows,) = made("qwen3_vl", 4, (1, 4, 4), values=values)
    assert isinstance(rows, Rows)
    assert [field.name for field in rows.bundle] == [
        "grid", "deepstack.0", "deepstack.1", "deepstack.2",
    ]  # fmt: skip
    parts = [rows.data, *(field.data for field in rows.bundle[1:])]
    for level, data in enumerate(parts):
        found = np.frombuffer(data.view, np.float32).reshape(4, HIDDEN)
        wanted = values[0, :, level * HIDDEN : (level + 1) * HIDDEN]
        assert (found == wanted.numpy()).all()


def test_markers_of_a_family_stand_around_the_rows() -> None:
    for family, rows in (
        ("llava", 16),
        ("llava_next", 40),
        ("gemma3", 9),
        ("gemma4", 50),
        ("internvl", 6),
    ):
        segments = made(family, rows)
        assert sum(len(part) for part in segments if isinstance(part, Rows)) == rows
        ends = family in ("gemma3", "gemma4", "internvl")
        assert [type(part) for part in segments] == ([Tokens, Rows, Tokens] if ends else [Rows])
    assert made("gemma3", 9)[1].atomic


@pytest.mark.parametrize(
    ("family", "height", "width", "grid"),
    [
        ("mistral3", 84, 140, (1, 3, 5)),
        ("mistral3", 20, 20, (1, 1, 1)),
        ("smolvlm", 40, 90, (1, 3, 5)),
        ("llama4", 56, 112, (1, 1, 2)),
        ("llama4", 30, 30, (1, 1, 1)),
    ],
)
def test_tokens_between_the_rows_of_an_image_follow_from_its_grid(
    family: str, height: int, width: int, grid: tuple[int, int, int]
) -> None:
    laid = layout(spec_of(family), height, width)
    assert laid.given_grid == grid
    given = Prompt.of(*made(family, laid.rows, grid))
    picture = Prompt.of(*media_segments(laid, bytes(16)))
    assert [(type(part), len(part)) for part in given.segments if isinstance(part, Rows)] == [
        (Rows, len(part)) for part in picture.segments if isinstance(part, Media)
    ]
    assert given.token_ids() == picture.token_ids()
    assert len(given) == laid.positions


@pytest.mark.parametrize(
    ("family", "rows", "grid", "width", "message"),
    [
        ("qwen2_vl", 12, (1, 8, 8), HIDDEN, "have 12 rows; this model's have 16 for"),
        ("qwen2_vl", 16, None, HIDDEN, "need image_grid_thw"),
        ("qwen2_vl", 16, (2, 8, 4), HIDDEN, r"is \[1, height, width\]"),
        ("qwen2_vl", 16, (1, 7, 8), HIDDEN, "multiples of 2"),
        ("qwen2_vl", 16, (1, 80_000, 80_000), HIDDEN, "1600000000 for"),
        ("qwen2_vl", 16, (1, 8, 8), HIDDEN // 2, "must be 4 wide"),
        ("qwen3_vl", 16, (1, 8, 8), HIDDEN, "must be 16 wide .*3 levels"),
        ("llava", 15, None, HIDDEN, "this model's have 16"),
        ("llava", 16, (1, 8, 8), HIDDEN, "take no image_grid_thw"),
        ("llava_next", 999, None, HIDDEN, "at most"),
        ("internvl", 7, None, HIDDEN, "a multiple of 3, at most 18"),
        ("internvl", 21, None, HIDDEN, "a multiple of 3, at most 18"),
        ("gemma4", 71, None, HIDDEN, "at most 70"),
        ("mistral3", 4, None, HIDDEN, r"need image_grid_thw, .* in rows, as tokens stand between"),
        ("mistral3", 4, (2, 2, 1), HIDDEN, "at most 55 lines of 55 rows, got"),
        ("mistral3", 4, (1, 2, 3), HIDDEN, "have 4 rows; this model's have 6 for"),
        ("mistral3", 56, (1, 56, 1), HIDDEN, "at most 55 lines of 55 rows, got"),
        ("mistral3", 4, (1, 2**31 - 1, 2**31 - 1), HIDDEN, "at most 55 lines"),
        ("smolvlm", 5, None, HIDDEN, "in tiles, as tokens stand between"),
        ("smolvlm", 20, (1, 2, 2), HIDDEN, "have 20 rows; this model's have 25 for"),
        ("smolvlm", 5, (1, 80_000, 80_000), HIDDEN, "at most 36 tiles"),
        ("smolvlm", 45, (1, 1, 8), HIDDEN, "at most 6 lines have names"),
        ("llama4", 4, (1, 2, 4), HIDDEN, "at most 7 tiles"),
    ],
)
def test_rows_that_the_model_could_not_have_made_are_refused(
    family: str, rows: int, grid: tuple[int, int, int] | None, width: int, message: str
) -> None:
    with pytest.raises(InvalidRequestError, match=message):
        made(family, rows, grid, width)
    # Once more: what the family's reader is made of is not part of a refusal.
    tracemalloc.start()
    with pytest.raises(InvalidRequestError, match=message):
        made(family, rows, grid, width)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_refused_by_their_name(bad: float) -> None:
    values = torch.ones(16, HIDDEN)
    values[3, 1] = bad
    with pytest.raises(InvalidRequestError, match="image_embeds must be finite: row 3") as caught:
        made("qwen2_vl", 16, (1, 8, 8), values=values)
    assert caught.value.param == "image_embeds"


def test_a_model_without_images_or_audio_takes_no_embeddings_of_them() -> None:
    with pytest.raises(InvalidRequestError, match="takes no audio_embeds"):
        made("llava", 16, kind="audio")
    with pytest.raises(InvalidRequestError, match=r"of shape \(rows, 4\) for one image"):
        made("llava", 16, values=torch.ones(2, 16, HIDDEN))
