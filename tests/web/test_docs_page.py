"""The API reference and the requests to try in a real browser, before a real server."""

from typing import Any

import pytest

from tests.live import Fleet
from tests.web.browser import PHONE, WIDE, tab

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def url(demo: Fleet) -> str:
    return demo.serve(enable_prompt_embeds=True, api_key=["right"])


def test_a_request_is_tried_and_its_answer_shown(browser: Any, url: str) -> None:
    with tab(browser, url + "/docs") as opened:
        completions = opened.page.locator("#post-v1-completions")
        completions.get_by_text("Try", exact=True).click()
        opened.page.fill("#key", "wrong")
        completions.locator("button.send").click()
        answer = completions.locator("pre")
        answer.get_by_text("401").wait_for()
        opened.page.fill("#key", "right")
        completions.locator("button:text('logprobs, greedy')").click()
        completions.locator("button.send").click()
        answer.get_by_text("top_logprobs").wait_for()
        assert '"usage"' in answer.inner_text()
        chats = opened.page.locator("#post-v1-chat-completions")
        chats.get_by_text("Try", exact=True).click()
        chats.locator("button:text('stream')").click()
        chats.locator("button.send").click()
        chats.locator("pre").get_by_text("data: [DONE]").wait_for()
        # What the browser itself says of a 401.
        assert [line for line in opened.said if "401" not in line] == []
        opened.said.clear()


def test_fields_are_described_and_refused_ones_shown_apart(browser: Any, url: str) -> None:
    with tab(browser, url + "/docs") as opened:
        completions = opened.page.locator("#post-v1-completions")
        completions.get_by_text("Request: CompletionRequest").click()
        assert completions.get_by_text("a random seed for each choice when absent").is_visible()
        assert not completions.get_by_text("there is no beam search").is_visible()
        completions.get_by_text("fields that are known and refused").click()
        assert completions.get_by_text("there is no beam search").is_visible()


def test_parameters_and_answers_are_described_too(browser: Any, url: str) -> None:
    with tab(browser, url + "/docs") as opened:
        sleep = opened.page.locator("#post-sleep")
        sleep.get_by_text("Parameters: level, mode, wait").click()
        assert sleep.get_by_text("what running requests get").is_visible()
        assert sleep.get_by_text("in the query").first.is_visible()
        completions = opened.page.locator("#post-v1-completions")
        completions.get_by_text("Answer, application/json").click()
        assert completions.get_by_text("that ended the answer; null otherwise").first.is_visible()


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_the_reference_is_accessible(
    browser: Any, url: str, size: tuple[int, int], scheme: str
) -> None:
    with tab(browser, url + "/docs", size, scheme) as opened:
        completions = opened.page.locator("#post-v1-completions")
        completions.get_by_text("Try", exact=True).click()
        completions.get_by_text("Request: CompletionRequest").click()
        completions.get_by_text("Parameters: X-Session-Id").click()
        assert opened.violations() == []
        wide = "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        assert opened.page.evaluate(wide) == 0
        opened.shot(f"docs-{size[0]}-{scheme}")


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_requests_to_try_are_accessible_and_lead_back_to_the_playground(
    browser: Any, demo: Fleet, size: tuple[int, int], scheme: str
) -> None:
    with tab(browser, demo.serve(enable_prompt_embeds=True) + "/start", size, scheme) as opened:
        opened.sees("2048 positions")
        assert opened.violations() == []
        opened.shot(f"start-{size[0]}-{scheme}")
        for page, heading in (("API", "/v1/completions"), ("Playground", "Settings")):
            opened.page.get_by_role("link", name=page, exact=True).click()
            opened.page.get_by_role("heading", name=heading).first.wait_for()
