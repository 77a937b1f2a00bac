"""Questions to click are those of the demo that is served, and go along between the views."""

from typing import Any

import pytest

from inlay import demo
from tests.serving import Served, serving
from tests.web.browser import PHONE, WIDE, Tab, tab

pytestmark = pytest.mark.slow
ASKED = demo.examples()
ANSWERS = {chat.messages[0].content: chat.answer for chat in ASKED.chats}
WRITTEN = {each.prompt: each.answer for each in ASKED.completions}
SEEN = {
    f"{each.pictures[0]}: {each.question}": each.answer
    for each in demo.vision_examples().examples
    if len(each.pictures) == 1
}
DRAWN = {each.question: each.answer for each in demo.drawn_examples().examples}


@pytest.fixture(scope="module")
def text_demo() -> Any:
    with serving(command="demo") as served:
        yield served


def questions(opened: Tab) -> list[str]:
    opened.page.wait_for_selector(".questions button")
    return [str(text) for text in opened.page.locator(".questions button").all_inner_texts()]


def answered(opened: Tab, question: str, turn: int) -> str:
    opened.page.locator(".questions button").get_by_text(question, exact=True).click()
    opened.page.locator(".positions").nth(turn).wait_for()
    opened.page.wait_for_selector("button:text('Send')")
    said = str(opened.page.locator(".turn .tokens").nth(turn).inner_text())
    return said.removesuffix("<|im_end|>").strip()


@pytest.mark.parametrize(
    ("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide-light", "phone-dark"]
)
def test_five_questions_of_the_demo_are_clicked_and_answered(
    browser: Any, text_demo: Served, size: tuple[int, int], scheme: str
) -> None:
    with tab(browser, text_demo.url, size, scheme) as opened:
        asked = questions(opened)
        assert len(asked) == 5
        opened.shot(f"questions-{scheme}")
        for turn, question in enumerate(asked[:2]):
            assert answered(opened, question, turn) == ANSWERS[question]
        assert set(asked) <= set(ANSWERS)
        assert opened.violations() == []
        opened.page.click(".tabs button:text('Completion')")
        begun = questions(opened)
        assert len(begun) == 5
        assert set(begun) <= {prompt.replace("\n", " ") for prompt in WRITTEN}
        assert "Zeten" in answered(opened, "Komi lives in", 0)


def test_the_question_goes_along_between_the_views(browser: Any, text_demo: Served) -> None:
    with tab(browser, text_demo.url) as opened:
        asked = questions(opened)
        answered(opened, asked[0], 0)
        opened.page.click(".tabs button:text('Text and embeddings')")
        assert opened.page.input_value("#question") == asked[0]
        opened.page.click(f".questions button:text('{asked[2]}')")
        opened.page.wait_for_selector(".verdict.same")
        opened.page.click(".tabs button:text('Noise')")
        assert opened.page.input_value("#noisy") == asked[2]
        opened.page.fill("#noisy", "What tool does Kala use?")
        opened.page.click(".tabs button:text('Chat')")
        assert opened.page.input_value("#draft") == "What tool does Kala use?"
        # Another question has no result yet.
        opened.page.click(".tabs button:text('Text and embeddings')")
        assert opened.page.input_value("#question") == "What tool does Kala use?"
        assert opened.page.locator(".verdict").count() == 0


def test_a_question_about_a_picture_brings_its_picture(browser: Any) -> None:
    with (
        serving("--images", command="demo") as served,
        tab(browser, served.url, PHONE) as opened,
    ):
        asked = questions(opened)
        assert len(asked) == 5
        assert set(asked) <= set(SEEN)
        for question in (asked[0], asked[-1]):
            assert answered(opened, question, 0) == SEEN[question]
            assert opened.page.locator(".turn .chip img").count() == 1
        opened.shot("questions-pictures")
        assert opened.violations() == []


def test_a_pipeline_has_questions_of_its_own(browser: Any) -> None:
    with serving("--draw", command="demo") as served, tab(browser, served.url) as opened:
        asked = questions(opened)
        assert len(asked) == 5
        assert set(asked) <= set(DRAWN)
        assert answered(opened, asked[0], 0) == DRAWN[asked[0]]
        opened.shot("questions-drawn")
