"""Layouts against transformers' own processors, over many sizes and settings."""

import functools

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.media.geometry import AnyResolution, Layout
from inlay.media.image_families import IMAGE_FAMILIES
from inlay.media.spec import layout, media_segments
from inlay.media.tiles import Lines
from inlay.messages.prompt import Buffer, Media, Prompt
from tests.examples import examples
from tests.media import processors
from tests.media.processors import Case

NEXT = [[336, 672], [672, 336], [672, 672], [1008, 336], [336, 1008]]
CASES = {
    "llava": lambda: processors.llava(336),
    "llava-full": lambda: processors.llava(64, 16, "full"),
    "llava-siglip": lambda: processors.llava(48, 8, "full", 0),
    "llava-old": lambda: processors.llava_from_the_model(336, 14, "default"),
    "llava-old-full": lambda: processors.llava_from_the_model(56, 14, "full"),
    "llava_next": lambda: processors.llava_next(336, 14, NEXT),
    "llava_next-tiny": lambda: processors.llava_next(16, 4, [[16, 32], [32, 16], [32, 32]]),
    "llava_onevision": lambda: processors.llava_onevision(384, 729, 6, 9),
    "llava_onevision-tiny": lambda: processors.llava_onevision(32, 16, 4, 4),
    "qwen2_vl": lambda: processors.qwen2_vl("qwen2_vl", 14, 56 * 56, 28 * 28 * 1280),
    "qwen2_5_vl-hub": lambda: processors.qwen2_vl("qwen2_5_vl", 14, 3136, 12845056, nested=False),
    "qwen2_vl-tiny": lambda: processors.qwen2_vl("qwen2_vl", 4, 8 * 8, 40 * 40),
    "qwen2_5_omni": lambda: processors.qwen2_5_omni(14, 3136, 12845056),
    "qwen3_vl": lambda: processors.qwen2_vl("qwen3_vl", 16, 65536, 16777216),
    "qwen3_5": lambda: processors.qwen2_vl("qwen3_5", 16, 65536, 16777216),
    "glm4v": lambda: processors.glm4v(14, 112 * 112, 28 * 28 * 15000),
    "qwen3_vl_moe": lambda: processors.qwen2_vl("qwen3_vl_moe", 16, 65536, 16777216),
    "qwen3_5_moe": lambda: processors.qwen2_vl("qwen3_5_moe", 16, 65536, 16777216),
    "glm4v_moe": lambda: processors.glm4v(14, 112 * 112, 28 * 28 * 15000, "glm4v_moe"),
    "glm4v-tiny": lambda: processors.glm4v(4, 16 * 16, 80 * 80),
    "internvl": lambda: processors.internvl(448, 12, 256),
    "internvl-tiny": lambda: processors.internvl(16, 5, 3),
    "internvl-uncut": lambda: processors.internvl(16, 1, 3),
    "pixtral": lambda: processors.pixtral("llava", 16, 1, 1024),
    "mistral3": lambda: processors.pixtral("mistral3", 14, 2, 1540),
    "mistral3-old": lambda: processors.pixtral("mistral3", 14, 2, 1540, told=False),
    "idefics3": lambda: processors.idefics3("idefics3", 4 * 364, 364, 169),
    "smolvlm": lambda: processors.idefics3("smolvlm", 4 * 512, 512, 64),
    "smolvlm-tiny": lambda: processors.idefics3("smolvlm", 100, 24, 5),
    "smolvlm-unnamed": lambda: processors.idefics3("smolvlm", 96, 24, 5, names=False),
    "smolvlm-largest": lambda: processors.idefics3("smolvlm", 5000, 1024, 5),
    "llama4": lambda: processors.llama4(336, 16),
    "llama4-largest": lambda: processors.llama4(56, 7, largest=True),
    "gemma3": lambda: processors.gemma3(256),
    "gemma4": lambda: processors.gemma4(16, 280),
    "gemma4-tiny": lambda: processors.gemma4(4, 70),
}
UNCOUNTED = {"smolvlm", "smolvlm-tiny", "smolvlm-unnamed", "smolvlm-largest"}
"""Their processors have no arithmetic of their own; their pixels are compared."""
case = functools.cache(lambda name: CASES[name]())

SIDES = st.one_of(st.integers(1, 40), st.integers(1, 700), st.integers(1, 6000))


def laid_out(found: Case, height: int, width: int) -> Layout | None:
    """The layout, or None for a size that both refuse."""
    try:
        return layout(found.spec, height, width)
    except InvalidRequestError as error:
        if "is too thin" in error.message:
            assert max(height, width) > 300 * min(height, width)
            return None
        # A processor that counts rows of a picture without width cannot resize one.
        refused = r"aspect ratio|0 x 0|exceeds|(height|width)=0"
        with pytest.raises(ValueError, match=refused):
            assert (found.tokens(height, width), found.ids(height, width)) == (0, [])
        return None


def test_no_family_is_left_out() -> None:
    # One more hears, too.
    families = (IMAGE_FAMILIES.keys() | {"qwen2_5_omni"}) - {"colqwen2"}
    assert IMAGE_FAMILIES["colqwen2"] is IMAGE_FAMILIES["qwen2_vl"]
    assert {case(name).spec.family for name in CASES} == families


@pytest.mark.parametrize("name", sorted(CASES.keys() - UNCOUNTED))
@settings(deadline=None, max_examples=examples(80))
@given(SIDES, SIDES)
@example(1, 1)
@example(1, 6000)
@example(6000, 1)
@example(30, 6000)
@example(6000, 31)
@example(6300, 6300)
def test_an_image_has_as_many_positions_as_for_transformers(
    name: str, height: int, width: int
) -> None:
    found = case(name)
    laid = laid_out(found, height, width)
    assert laid is None or laid.positions == found.tokens(height, width)


@pytest.mark.parametrize(
    "name",
    [
        # The processor scales every image to 5,000 pixels.
        pytest.param(name, marks=pytest.mark.slow) if name == "smolvlm-largest" else name
        for name in CASES
    ],
)
@settings(deadline=None, max_examples=examples(8))
@given(st.integers(8, 500), st.integers(8, 500))
def test_an_image_is_the_tokens_and_rows_that_transformers_makes_of_pixels(
    name: str, height: int, width: int
) -> None:
    found = case(name)
    laid = laid_out(found, height, width)
    assert laid is None or found.flat(laid) == found.ids(height, width)


@pytest.mark.parametrize("name", ["llava_onevision", "llava_onevision-tiny"])
@pytest.mark.parametrize(("height", "width"), [(300, 400), (31, 90), (900, 40)])
def test_an_image_of_llava_onevision_is_cut_also_beside_others(
    name: str, height: int, width: int
) -> None:
    """As by transformers of a list of images, and by vLLM.

    Of images in a list by conversation transformers sees the base view and one learnt row.
    """
    found = case(name)
    geometry = found.spec.image
    assert isinstance(geometry, AnyResolution)
    laid = layout(found.spec, height, width)
    listed = found.ids(height, width, given=lambda picture: [picture, picture])
    assert found.flat(laid) == listed
    joint = found.ids(height, width, given=lambda picture: [[picture, picture]])
    assert len(joint) == geometry.base_rows + 1 < laid.rows


@pytest.mark.parametrize("name", CASES)
def test_the_runs_of_an_item_are_its_rows_in_order_and_its_bytes_come_once(name: str) -> None:
    found = case(name)
    laid = layout(found.spec, 300, 400)
    segments = media_segments(laid, bytes(16), Buffer(b"picture"), detail="auto")
    runs = [segment for segment in segments if isinstance(segment, Media)]
    assert len(Prompt.of(*segments)) == laid.positions
    assert [run.start for run in runs] == [sum(map(len, runs[:i])) for i in range(len(runs))]
    assert {run.total for run in runs} == {laid.rows}
    assert [run.data is not None for run in runs] == [True] + [False] * (len(runs) - 1)


@pytest.mark.parametrize("name", CASES)
def test_a_size_out_of_bounds_is_refused_before_anything_is_laid_out(name: str) -> None:
    for height, width in ((0, 5), (5, 0), (-1, -1), (80_000, 80_000), (1, 40_000_001)):
        with pytest.raises(InvalidRequestError, match="allowed: 1 to 40000000"):
            layout(case(name).spec, height, width)


@pytest.mark.parametrize(
    ("name", "height", "width"),
    [
        ("llava", 65_535, 1),
        ("llava", 1, 65_535),
        ("llama4", 500_000, 1),
        ("internvl", 500_000, 1),
        ("llava_next", 500_000, 1),
    ],
)
def test_an_image_that_takes_gigabytes_to_resize_is_refused(
    name: str, height: int, width: int
) -> None:
    with pytest.raises(InvalidRequestError, match="is too thin: to resize it takes"):
        layout(case(name).spec, height, width)
    layout(case(name).spec, -(-height // 200), -(-width // 200))


@pytest.mark.parametrize("name", CASES)
@settings(deadline=None, max_examples=examples(40))
@given(SIDES, SIDES)
def test_low_detail_never_takes_more_rows(name: str, height: int, width: int) -> None:
    found = case(name)
    laid = laid_out(found, height, width)
    if laid is not None:
        try:
            low = layout(found.spec, height, width, "low")
        except InvalidRequestError:  # within smaller bounds a narrow picture has no width left
            assert isinstance(found.spec.image, Lines)
        else:
            assert 1 <= low.rows <= laid.rows
