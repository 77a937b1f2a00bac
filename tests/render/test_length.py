"""Long texts are refused piece by piece, and only when they are certain not to fit."""

import pytest

from inlay.base.errors import ContextLengthError
from inlay.messages.prompt import Prompt
from inlay.render import Renderer
from tests.render.directories import qwen_like

LIMIT = 20_000
TEXT = "the harbour town counts its lanterns every night "


@pytest.fixture(scope="module")
def bounded() -> Renderer:
    return Renderer.load(qwen_like(), max_positions=LIMIT)


@pytest.fixture(scope="module")
def free() -> Renderer:
    return Renderer.load(qwen_like())


def fitting(renderer: Renderer, positions: int) -> str:
    """A text of at least `positions` tokens, and not many more."""
    each = len(renderer.encode(TEXT * 100)) / 100
    return TEXT * (round(positions / each) + 1)


@pytest.mark.parametrize("text", ["a b " * 100_000, "a" * 400_000, TEXT * 10_000, "é🙂" * 80_000])
def test_a_text_far_beyond_the_limit_is_refused(bounded: Renderer, text: str) -> None:
    with pytest.raises(ContextLengthError, match=f"maximum context length is {LIMIT} tokens"):
        bounded.encode(text)
    with pytest.raises(ContextLengthError, match="maximum context length"):
        bounded.chat([{"role": "user", "content": text}])


def test_what_is_refused_is_beyond_the_limit_and_what_is_not_is_counted_whole(
    bounded: Renderer, free: Renderer
) -> None:
    for share in (0.5, 0.9, 0.99, 1.0, 1.01, 1.1, 1.3):
        text = fitting(free, round(LIMIT * share))
        whole = free.encode(text)
        try:
            assert bounded.encode(text) == whole
        except ContextLengthError:
            assert len(whole) > LIMIT


def test_nothing_is_refused_without_a_limit(free: Renderer) -> None:
    prompt = free.chat([{"role": "user", "content": TEXT * 5000}])
    assert isinstance(prompt, Prompt)
    assert len(prompt) > LIMIT
