"""The playground in a real browser, before a real server."""

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import pytest

from inlay import demo as bundled
from tests.live import Fleet
from tests.web.browser import PHONE, WIDE, Tab, tab

pytestmark = pytest.mark.slow
QUESTION, ANSWER = "What pet does Koso have?", "swan"
SOFT = bundled.soft_prompt_path()


@pytest.fixture(scope="module")
def url(demo: Fleet) -> str:
    return demo.serve(enable_prompt_embeds=True, enable_embedding_lookup=True)


def ask(opened: Tab, text: str) -> None:
    turns = opened.page.locator(".turn").count()
    opened.page.fill("#draft", text)
    opened.page.keyboard.press("Enter")
    opened.page.locator(".positions").nth(turns).wait_for()
    opened.page.wait_for_selector("button:text('Send')")


def clear(opened: Tab) -> None:
    opened.page.click("button:text('Clear')")
    opened.page.wait_for_selector(".turn", state="detached")


def holds(opened: Tab, text: str) -> None:
    """Wait until the field for the next message holds `text`."""
    opened.page.wait_for_function("it => document.querySelector('#draft').value === it", arg=text)


def loaded(opened: Tab) -> None:
    opened.page.wait_for_selector("select option:text('tiny')", state="attached")


def test_a_chat_shows_its_answer_what_was_cached_and_what_else_it_might_have_been(
    browser: Any, url: str
) -> None:
    with tab(browser, url) as opened:
        loaded(opened)
        ask(opened, QUESTION)
        assert ANSWER in opened.text(".turn .tokens")
        assert "0 cached" in opened.text(".positions summary")
        # By the keyboard: the first token and its alternatives.
        opened.page.locator(".tokens").focus()
        opened.page.evaluate(
            """() => { for (const key of ["ArrowRight", "ArrowRight", "ArrowLeft"])
            document.querySelector(".tokens").dispatchEvent(
            new KeyboardEvent("keydown", {key, bubbles: true})); }"""
        )
        # Faster than the page is drawn, as keys that are held are.
        opened.sees("Token 1:")
        assert opened.page.locator(".alternatives li").count() == 5
        # By the mouse: the end token.
        opened.page.locator(".tokens .token").last.hover()
        opened.sees("Token 2:")
        clear(opened)
        ask(opened, " ".join([QUESTION] * 6))
        clear(opened)
        ask(opened, " ".join([QUESTION] * 6))
        opened.page.click(".positions summary")
        cached = opened.page.locator(".cell[data-cached]").count()
        assert cached >= 32
        assert f"{cached} cached" in opened.text(".positions summary")


def test_the_next_message_is_sent_while_the_last_prompts_tokens_are_still_named(
    browser: Any, url: str
) -> None:
    held: list[Any] = []
    with tab(browser, url) as opened:
        loaded(opened)
        opened.page.route("**/tokenize", lambda route: held.append(route))
        ask(opened, QUESTION)
        ask(opened, QUESTION)
        assert opened.page.locator(".cell.named").count() == 0
        for route in held:
            route.continue_()
        opened.page.locator(".cell.named").first.wait_for(state="attached")


def test_copied_requests_ask_the_same(browser: Any, url: str) -> None:
    commands = {"curl": ["bash"], "Python": [sys.executable], "JavaScript": ["node"]}
    with tab(browser, url) as opened:
        loaded(opened)
        opened.page.fill("#draft", 'It\'s "this": ' + QUESTION)
        answers = {}
        for language, command in commands.items():
            opened.page.click(f".snippets button:text('{language}')")
            opened.page.wait_for_selector(f"pre[aria-label='Request as {language}']")
            snippet = opened.text("pre")
            if shutil.which(command[0]) is None:
                continue
            if language == "JavaScript":
                command = [*command, "--input-type=module"]
            done = subprocess.run(
                command, input=snippet, capture_output=True, timeout=180, check=True, text=True
            )
            answers[language] = done.stdout.strip()
        body = json.loads(answers.pop("curl"))
        answer = body["choices"][0]["message"]["content"]
        assert set(answers.values()) == {answer.strip()}
        opened.page.click("button:text('Send')")
        opened.page.wait_for_selector(".positions")
        assert answer in opened.text(".turn .tokens")


def test_a_file_becomes_a_chip_whose_rows_are_shown_and_that_stands_where_its_mark_is(
    browser: Any, url: str
) -> None:
    task = bundled.examples().soft_prompt
    example = task.held_out[0]
    with tab(browser, url) as opened:
        loaded(opened)
        opened.page.set_input_files("input[type=file]", str(SOFT))
        opened.page.click(".chip button:text('Rows')")
        opened.page.wait_for_selector(".rows tbody tr")
        assert opened.page.locator(".rows tbody tr").count() == 8
        assert "nearest tokens" in opened.text(".rows thead")
        assert opened.page.input_value("#draft") == "⟦1⟧"
        ask(opened, f"⟦1⟧{example.input}")
        stored = httpx.post(
            f"{url}/v1/prompt_embeds",
            content=SOFT.read_bytes(),
            headers={"content-type": "application/octet-stream"},
        ).json()
        content = [
            {"type": "prompt_embeds", "ref": stored["id"]},
            {"type": "text", "text": example.input},
        ]
        answer = httpx.post(
            f"{url}/v1/chat/completions",
            json={
                "model": "tiny",
                "temperature": 0,
                "messages": [{"role": "user", "content": content}],
            },
            timeout=180,
        ).json()
        assert answer["choices"][0]["message"]["content"] in opened.text(".turn .tokens")


def test_files_that_are_no_prompt_are_refused_with_what_to_do(
    browser: Any, url: str, tmp_path: Path
) -> None:
    wrong, huge = tmp_path / "notes.txt", tmp_path / "huge.safetensors"
    wrong.write_text("a text of more than a hundred characters, which is no tensor " * 3)
    with huge.open("wb") as file:
        file.truncate(2 << 30)
    with tab(browser, url) as opened:
        loaded(opened)
        opened.page.set_input_files("input[type=file]", str(huge))
        opened.sees("This is too large.")
        assert "2.0 GB" in opened.text(".said")
        assert "Nothing was sent" in opened.text(".said")
        assert opened.said == []
        opened.page.click("button:text('Dismiss')")
        opened.page.set_input_files("input[type=file]", str(wrong))
        opened.sees("The server refuses this request.")
        assert "no known format" in opened.text(".said")
        assert opened.page.locator(".chip").count() == 0
        # Browsers themselves report the status of a refused request.
        assert all("400" in line for line in opened.said)
        opened.said.clear()


def test_text_and_embeddings_answer_with_the_same_tokens(browser: Any, url: str) -> None:
    with tab(browser, f"{url}/#ask=" + QUESTION.replace(" ", "%20")) as opened:
        loaded(opened)
        opened.page.click(".tabs button:text('Text and embeddings')")
        opened.page.click("button:text('Compare')")
        opened.page.wait_for_selector(".verdict.same")
        assert opened.text(".side:nth-child(1) .tokens") == opened.text(
            ".side:nth-child(2) .tokens"
        )
        assert "KB of rows" in opened.text(".side:nth-child(2) .facts")


def biased(route: Any) -> None:
    """Push a request to one token, so that its answer is another."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"logit_bias": {"9": 100}}))


def test_answers_that_differ_are_told_by_their_first_token(browser: Any, url: str) -> None:
    with tab(browser, url) as opened:
        loaded(opened)
        opened.page.route("**/v1/completions", biased)
        opened.page.click(".tabs button:text('Text and embeddings')")
        opened.page.get_by_label("Max tokens").fill("4")
        opened.page.fill("#question", QUESTION)
        opened.page.click("button:text('Compare')")
        opened.page.wait_for_selector(".verdict.differs")
        assert f"token is number 1: {ANSWER} (" in opened.text(".verdict")
        for side in opened.page.locator(".side").all():
            assert side.locator("[data-differs]").count() == 1
        opened.shot("compare-differs")
        assert opened.violations() == []


def test_the_slider_shows_what_noise_hides_and_what_it_costs(browser: Any, url: str) -> None:
    with tab(browser, url) as opened:
        loaded(opened)
        opened.page.click(".tabs button:text('Noise')")
        opened.page.fill("#noisy", QUESTION)
        opened.page.click("button:text('Try all levels')")
        opened.page.wait_for_selector("td button:text-is('16')")
        opened.page.wait_for_selector("button:text('Try all levels')")
        rows = opened.page.locator("tbody tr").all_inner_texts()
        assert "100%" in rows[0]
        assert ANSWER in rows[0]
        assert "100%" not in rows[-1]
        # What is shown, the chosen line and the slider are of one level.
        shown = opened.text("tr[data-chosen] button")
        assert opened.text(".slider output") == shown
        assert opened.text(".side h3").endswith(f"noise {shown}")
        opened.page.focus("input[type=range]")
        opened.page.keyboard.press("Home")
        opened.sees("as without noise")


def test_a_server_that_does_not_look_tokens_up_says_how_it_would(browser: Any, demo: Fleet) -> None:
    with tab(browser, demo.serve(enable_prompt_embeds=True)) as opened:
        loaded(opened)
        opened.page.click(".tabs button:text('Noise')")
        opened.sees("--enable-embedding-lookup")
        opened.page.click(".tabs button:text('Chat')")
        opened.page.set_input_files("input[type=file]", str(SOFT))
        opened.page.click(".chip button:text('Rows')")
        opened.sees("Nearest tokens are off here")
        assert "nearest" not in opened.text(".rows thead")


def test_a_key_is_asked_for_and_a_rate_is_explained(browser: Any, demo: Fleet) -> None:
    locked = demo.serve(enable_prompt_embeds=True, api_key=["one"], max_client_rate=1)
    with tab(browser, locked) as opened:
        opened.sees("An API key is needed.")
        opened.page.fill("input[type=password]", "one")
        loaded(opened)
        ask(opened, QUESTION)
        opened.page.fill("#draft", QUESTION)
        opened.page.keyboard.press("Enter")
        opened.sees("Too many requests from you.")
        assert "asks for" in opened.text(".problem")
        # The prompt is kept, and the key is nowhere but in the field.
        holds(opened, QUESTION)
        opened.page.click(".snippets button:text('curl')")
        assert "$INLAY_KEY" in opened.text("pre")
        kept = opened.page.evaluate("[localStorage.length, sessionStorage.length, document.cookie]")
        assert kept == [0, 0, ""]
        assert all("401" in line or "429" in line for line in opened.said)
        opened.said.clear()


def test_a_lost_server_and_a_vanished_model_keep_the_prompt(browser: Any, demo: Fleet) -> None:
    url = demo.serve(enable_prompt_embeds=True)
    with tab(browser, url) as opened:
        loaded(opened)
        opened.page.context.set_offline(True)
        opened.page.fill("#draft", QUESTION)
        opened.page.keyboard.press("Enter")
        opened.sees("The server does not answer.")
        opened.page.context.set_offline(False)
        opened.page.click("button:text('Try again')")
        opened.page.wait_for_selector(".positions")
        clear(opened)
        opened.page.evaluate(
            """() => { const field = document.querySelector("select");
            field.add(new Option("gone", "gone")); field.value = "gone";
            field.dispatchEvent(new Event("change", {bubbles: true})); }"""
        )
        opened.page.fill("#draft", QUESTION)
        opened.page.keyboard.press("Enter")
        opened.sees("It is not there any more.")
        assert "does not exist" in opened.text(".said")
        holds(opened, QUESTION)
        opened.said.clear()


STOP_OR_ENDED = """() => {
    const named = text => [...document.querySelectorAll("button")]
        .find(button => button.textContent.trim() === text);
    if (!document.querySelector(".figures")) return "";
    if (named("Stop")) { named("Stop").click(); return "stopped"; }
    return named("Send") ? "ended" : "";
}"""
"""Looks for the button and presses it in one go, as the answer may end in between."""


def endless(route: Any) -> None:
    """Let a request go on behind the model's end tokens, which the page has no setting for."""
    route.continue_(post_data=json.dumps(route.request.post_data_json | {"ignore_eos": True}))


def test_an_answer_can_be_stopped(browser: Any, demo: Fleet) -> None:
    with tab(browser, demo.serve(enable_prompt_embeds=True)) as opened:
        loaded(opened)
        opened.page.route("**/v1/completions", endless)
        opened.page.click(".tabs button:text('Completion')")
        opened.page.get_by_label("Max tokens").fill("2000")
        opened.page.fill("#draft", QUESTION)
        for _ in range(20):
            opened.page.keyboard.press("Enter")
            found = opened.page.wait_for_function(STOP_OR_ENDED).json_value()
            opened.page.wait_for_selector("button:text('Send')")
            if found == "stopped" and "stopped" in opened.text(".figures"):
                break
        assert "stopped" in opened.text(".figures")
        assert demo.idle_within(60)


def test_the_keyboard_alone_reaches_everything(browser: Any, url: str) -> None:
    with tab(browser, url) as opened:
        loaded(opened)
        reached = []
        for _ in range(40):
            opened.page.keyboard.press("Tab")
            reached.append(
                opened.page.evaluate(
                    "document.activeElement.id || document.activeElement.innerText "
                    "|| document.activeElement.labels?.[0]?.innerText.split('\\n')[0] || ''"
                )
            )
            if reached[-1] == "draft":
                opened.page.keyboard.type(QUESTION)
        assert reached[0] == "Skip to content"
        for name in ("API", "Noise", "draft", "Send", "curl", "Temperature"):
            assert name in reached, reached


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
def test_people_who_see_or_steer_otherwise_can_use_it(
    browser: Any, url: str, size: tuple[int, int], scheme: str
) -> None:
    name = f"{'wide' if size == WIDE else 'phone'}-{scheme}"
    with tab(browser, url, size, scheme) as opened:
        loaded(opened)
        ask(opened, QUESTION)
        ask(opened, "What is the favourite colour of Kala?")
        opened.page.locator(".positions summary").last.click()
        opened.page.locator(".tokens").last.focus()
        opened.page.keyboard.press("ArrowRight")
        opened.page.set_input_files("input[type=file]", str(SOFT))
        opened.page.click(".chip button:text('Rows')")
        opened.page.wait_for_selector(".rows tbody tr")
        opened.shot(f"chat-{name}")
        assert opened.violations() == []
        opened.page.click(".tabs button:text('Text and embeddings')")
        opened.page.fill("#question", QUESTION)
        opened.page.click("button:text('Compare')")
        opened.page.wait_for_selector(".verdict.same")
        opened.shot(f"compare-{name}")
        assert opened.violations() == []
        opened.page.click(".tabs button:text('Noise')")
        opened.page.fill("#noisy", QUESTION)
        opened.page.click("button:text-is('Try')")
        opened.page.wait_for_selector(".reading")
        opened.shot(f"noise-{name}")
        assert opened.violations() == []
        overflow = opened.page.evaluate(
            "document.documentElement.scrollWidth - document.documentElement.clientWidth"
        )
        assert overflow <= 0
