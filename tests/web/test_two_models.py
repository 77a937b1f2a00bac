"""Two models of a fleet that are asked the same question, side by side."""

from collections.abc import Iterator
from typing import Any

import pytest

from inlay import demo as bundled
from inlay.engine.settings import EngineSettings
from tests.live import Fleet, fleet
from tests.models import tiny
from tests.serving import Served, serving
from tests.web.browser import PHONE, WIDE, tab

pytestmark = pytest.mark.slow
QUESTION, ANSWER = "What pet does Koso have?", "swan"


@pytest.fixture(scope="module")
def pair() -> Iterator[Fleet]:
    other = EngineSettings.of(
        model=str(tiny("llama")),
        served_model_name=["random"],
        max_model_len=128,
        health_probe_interval=0,
    )
    with fleet(bundled.model_dir(), others=[other], dtype="float32") as running:
        yield running


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    with serving(command="demo") as served:
        yield served


@pytest.mark.parametrize(
    ("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide-light", "phone-dark"]
)
def test_one_question_goes_to_two_models_and_their_answers_stand_side_by_side(
    browser: Any, pair: Fleet, size: tuple[int, int], scheme: str
) -> None:
    with tab(browser, pair.serve(), size, scheme) as opened:
        opened.page.wait_for_selector("select option:text('random')", state="attached")
        opened.page.fill("#draft", QUESTION)
        if size == PHONE:
            opened.page.click(".settings summary")
        opened.page.get_by_label("Max tokens").fill("8")
        opened.page.click(".tabs button:text('Two models')")
        assert opened.page.input_value("#both") == QUESTION
        opened.page.get_by_label("Beside tiny").select_option("random")
        opened.page.click("button:text('Ask both')")
        opened.sees("The answers differ.")
        sides = opened.page.locator(".side")
        assert sides.locator("h3").all_inner_texts() == ["tiny", "random"]
        assert ANSWER in sides.first.locator(".tokens").inner_text()
        opened.shot(f"two-models-{scheme}")
        assert opened.violations() == []
        # The same model under its other name.
        opened.page.get_by_label("Beside tiny").select_option("org/tiny")
        opened.page.wait_for_selector(".side", state="detached")
        opened.page.click("button:text('Ask both')")
        opened.sees("Both answer with the same text.")


def test_what_one_model_refuses_is_said_on_its_side_and_the_other_answers(
    browser: Any, pair: Fleet
) -> None:
    with tab(browser, pair.serve()) as opened:
        opened.page.wait_for_selector("select option:text('random')", state="attached")
        opened.page.click(".tabs button:text('Two models')")
        opened.page.get_by_label("Beside tiny").select_option("random")
        # More tokens than the random model reads.
        opened.page.get_by_label("Max tokens").fill("120")
        opened.page.fill("#both", QUESTION)
        opened.page.click("button:text('Ask both')")
        opened.sees("The server refuses this request.")
        opened.page.wait_for_selector("button:text('Ask both')")
        first, second = opened.page.locator(".side").all()
        assert ANSWER in first.locator(".tokens").inner_text()
        assert "maximum context length" in second.locator(".problem .said").inner_text()
        opened.said.clear()


def test_one_model_alone_has_nothing_beside_it(browser: Any, demo: Served) -> None:
    with tab(browser, demo.url) as opened:
        opened.page.wait_for_selector("select option:text('inlay-demo')", state="attached")
        tabs = opened.page.locator(".tabs button").all_inner_texts()
        assert "Audit" in tabs
        assert "Two models" not in tabs


def of_random(route: Any) -> bool:
    return bool(route.request.post_data_json["model"] == "random")


def cut_short(route: Any) -> None:
    """Let a model's stream end before its last event."""
    if not of_random(route):
        route.continue_()
        return
    answer = route.fetch()
    route.fulfill(response=answer, body=answer.text().partition("data: [DONE]")[0])


HOLDS = """() => {
    const real = window.fetch;
    window.fetch = async (url, options) => {
        const answer = await real(url, options);
        if (!options?.body?.includes('"model":"random"')) return answer;
        const begun = (await answer.text()).split("data: [DONE]")[0];
        const body = new ReadableStream({ start(stream) {
            stream.enqueue(new TextEncoder().encode(begun));
            options.signal.addEventListener("abort", () => stream.error(options.signal.reason));
        } });
        return new Response(body, { status: answer.status, headers: answer.headers });
    };
}"""
"""Lets a model's stream stay open behind its tokens, until it is stopped."""


def asked_both(opened: Any) -> None:
    opened.page.wait_for_selector("select option:text('random')", state="attached")
    opened.page.get_by_label("Max tokens").fill("8")
    opened.page.click(".tabs button:text('Two models')")
    opened.page.get_by_label("Beside tiny").select_option("random")
    opened.page.fill("#both", QUESTION)
    opened.page.click("button:text('Ask both')")


def test_a_stream_that_breaks_has_its_problem_below_what_came_and_no_verdict(
    browser: Any, pair: Fleet
) -> None:
    with tab(browser, pair.serve()) as opened:
        opened.page.route("**/v1/chat/completions", cut_short)
        asked_both(opened)
        opened.page.wait_for_selector("button:text('Ask both')")
        first, second = opened.page.locator(".side").all()
        assert ANSWER in first.locator(".tokens").inner_text()
        assert second.locator(".tokens").inner_text()
        assert "the answer was cut short" in second.locator(".problem .said").inner_text()
        assert opened.page.locator(".problem").count() == 1
        assert opened.page.get_by_text("The answers differ.").count() == 0


def test_an_answer_that_is_stopped_is_not_compared(browser: Any, pair: Fleet) -> None:
    with tab(browser, pair.serve()) as opened:
        opened.page.evaluate(HOLDS)
        asked_both(opened)
        first, second = (opened.page.locator(".side").nth(place) for place in (0, 1))
        second.locator(".tokens").wait_for()
        first.get_by_text(ANSWER).first.wait_for()
        opened.page.click("button:text('Stop')")
        second.get_by_text("Stopped.").wait_for()
        opened.page.wait_for_selector("button:text('Ask both')")
        assert opened.page.get_by_text("The answers differ.").count() == 0
        assert first.locator(".problem").count() == 0
