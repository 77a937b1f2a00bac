"""Images in chats: at the placeholders that the template writes, or in place where it writes none."""

from typing import Any

import pytest

from inlay.api.generation.truncation import truncated
from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Media, Prompt, Rows, Segment, Tokens
from inlay.render import ChatMedia, MediaForm, Renderer, Side
from tests.render.chats import embeds, rows, text, user
from tests.render.directories import qwen_like

PART = {"type": "image"}
PIC = MediaForm("image", "[pic]")
PARTS = (
    "{% for m in messages %}{% for p in m.content %}"
    "{% if p.type == 'KIND' %}[pic]{% else %}{{ p.text }}{% endif %}{% endfor %}{% endfor %}"
)
FIRST = (
    "{% for m in messages %}{% for p in m.content if p.type == 'image' %}[pic]{% endfor %}"
    "{% for p in m.content if p.type == 'text' %}{{ p.text }}{% endfor %}{% endfor %}"
)
STRINGS = "{% for m in messages %}{{ m.content }}{% endfor %}"


def media(name: int, count: int = 3) -> list[Segment]:
    """An image of two runs with a token between."""
    digest = bytes([name] * 16)
    return [
        Media("image", digest, count, None, "r", None, False, 0, 2 * count),
        Tokens([7]),
        Media("image", digest, count, None, None, None, False, count, 2 * count),
    ]


def image(index: int) -> dict[str, Any]:
    return {**PART, "index": index}


def shown(of: Renderer, prompt: Prompt) -> list[str]:
    """Segments in words: text, "rows", and the name of each image at its first run."""
    names: list[str] = []
    inside = False
    for segment in prompt.segments:
        if isinstance(segment, Tokens):
            if not inside:
                names.append(of.decode(segment.ids))
        elif isinstance(segment, Rows):
            names.append("rows")
        else:
            inside = segment.start == 0
            if inside:
                names.append(f"image {segment.digest[0]}")
    return names


def chat(template: str, *parts: dict[str, Any], images: int, **options: Any) -> list[str]:
    of = Renderer.load(qwen_like(), chat_template=template)
    given = ChatMedia([media(index) for index in range(images)], [PIC] * images)
    prompt = of.chat(user(*parts), media=given, add_generation_prompt=False, **options)
    return shown(of, prompt)


@pytest.mark.parametrize("kind", ["image", "image_url"])
def test_images_stand_where_the_template_writes_them(kind: str) -> None:
    found = chat(
        PARTS.replace("KIND", kind),
        text("a"), image(0), embeds(0), text("b"), image(1),
        images=2, rows=[rows()],
    )  # fmt: skip
    assert found == ["a", "image 0", "rows", "b", "image 1"]


def test_a_template_may_write_images_first() -> None:
    found = chat(FIRST, text("a"), image(0), embeds(0), image(1), images=2, rows=[rows()])
    assert found == ["image 0", "image 1", "a", "rows"]


def test_a_template_without_images_has_them_in_place() -> None:
    found = chat(STRINGS, text("a"), image(0), embeds(0), text("b"), images=1, rows=[rows()])
    assert found == ["a\n", "image 0", "\n", "rows", "b"]


@pytest.mark.parametrize("template", [PARTS.replace("KIND", "image"), FIRST, STRINGS])
def test_a_placeholder_in_a_text_stays_text(template: str) -> None:
    found = chat(template, text("a[pic]b"), image(0), images=1)
    assert "image 0" in found
    assert "a[pic]b" in "".join(found)


def test_a_template_that_writes_more_placeholders_than_images_is_named() -> None:
    template = "[pic]" + PARTS.replace("KIND", "image")
    # It writes one without an image, too, so images are not left to it.
    with pytest.raises(InvalidRequestError, match=r"wrote '\[pic\]' 1 times for 0 items"):
        chat(template, image(0), images=1)


def test_texts_around_an_image_are_the_familys() -> None:
    of = Renderer.load(qwen_like(), chat_template=PARTS.replace("KIND", "image"))
    given = ChatMedia([media(0)], [MediaForm("image", "[pic]", "<", ">")])
    prompt = of.chat(user(text("a"), image(0)), media=given, add_generation_prompt=False)
    assert [of.decode(segment.ids) for segment in prompt.segments if isinstance(segment, Tokens)][
        ::2
    ] == ["a<", ">"]


def test_an_answer_that_ends_with_an_image_cannot_be_continued() -> None:
    of = Renderer.load(qwen_like(), chat_template=PARTS.replace("KIND", "image"))
    with pytest.raises(InvalidRequestError, match="it ends with media"):
        of.chat(
            [{"role": "assistant", "content": [text("a"), image(0)]}],
            media=ChatMedia([media(0)], [PIC]),
            add_generation_prompt=False,
            continue_final_message=True,
        )


@pytest.mark.parametrize("keep", range(1, 12))
@pytest.mark.parametrize("side", ["left", "right"])
def test_a_truncation_that_cuts_an_image_is_refused_with_the_next_lengths(
    keep: int, side: Side
) -> None:
    prompt = Prompt.of(Tokens([1, 2]), *media(0), Tokens([3, 4]))
    if 2 < keep < 9:
        message = rf"keeps {keep} of 11 .* media of 7 positions .* at most 2, .* at least 9,"
        with pytest.raises(InvalidRequestError, match=message):
            truncated(prompt, keep, side)
    else:
        found = prompt.slice(0, keep) if side == "right" else prompt.slice(11 - keep, 11)
        assert truncated(prompt, keep, side) == found
