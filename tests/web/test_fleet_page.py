"""The page of the workers, with two of them, one of which is killed while it answers."""

import os
import signal
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from tests.live import Fleet, fleet
from tests.models import tiny
from tests.web.browser import PHONE, WIDE, tab

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair() -> Iterator[Fleet]:
    with fleet(tiny("llama"), workers=2, dtype="float32", enable_sleep_mode=True) as running:
        yield running


@pytest.fixture(scope="module")
def url(pair: Fleet) -> str:
    return pair.serve(api_key=["user"], admin_api_key=["chief"])


def test_only_an_admin_sees_the_workers(url: str) -> None:
    assert httpx.get(f"{url}/workers").status_code == 401
    user = {"authorization": "Bearer user"}
    assert httpx.get(f"{url}/workers", headers=user).status_code == 403
    found = httpx.get(f"{url}/workers", headers={"authorization": "Bearer chief"}).json()
    assert len(found["data"]) == 2
    for worker in found["data"]:
        assert (worker["model"], worker["state"], worker["asleep"]) == ("tiny", "unprobed", 0)
        assert worker["running"] == 0
        assert worker["blocks_total"] > 0
    # Whoever is no admin is not told who made an answer either.
    body = {"model": "tiny", "prompt": "a", "max_tokens": 2, "stream": True}
    for key, named in (("user", False), ("chief", True)):
        headers = {"authorization": f"Bearer {key}", "x-show-workers": "1"}
        answer = httpx.post(f"{url}/v1/completions", json=body, headers=headers, timeout=180)
        assert (": worker " in answer.text) == named


@pytest.mark.parametrize("size", [WIDE, PHONE], ids=["wide", "phone"])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_workers_are_cards_and_take_orders(
    browser: Any, url: str, size: tuple[int, int], scheme: str
) -> None:
    name = f"{'wide' if size == WIDE else 'phone'}-{scheme}"
    with tab(browser, f"{url}/fleet", size, scheme) as opened:
        opened.page.fill("input[type=password]", "chief")
        opened.page.keyboard.press("Enter")
        opened.page.wait_for_selector(".card")
        assert opened.page.locator(".card").count() == 2
        opened.said.clear()
        if scheme == "light":
            # No fleet over NATS: these workers end with their server.
            assert opened.page.get_by_role("button", name="Drain").count() == 0
            opened.page.locator("#orders ~ .row button:text-is('Sleep')").click()
            opened.sees("Its running requests end first")
            opened.page.click("button:text('Yes, sleep')")
            opened.sees("level 1")
            opened.page.locator("#orders ~ .row button:text-is('Wake')").click()
            opened.sees("Wake tiny: done")
            (first, other) = (opened.page.locator(".card").nth(index) for index in range(2))
            first.get_by_role("button", name="Sleep").click()
            first.get_by_role("button", name="Yes, sleep").click()
            first.get_by_text("level 1").wait_for()
            assert other.get_by_text("level 1").count() == 0
            first.get_by_role("button", name="Wake").click()
            first.get_by_role("button", name="Sleep").wait_for()
        opened.shot(f"fleet-{name}")
        assert opened.violations() == []


def test_the_colour_changes_and_the_text_does_not_when_a_worker_is_killed(
    browser: Any, pair: Fleet, url: str
) -> None:
    headers = {"authorization": "Bearer chief"}
    body = {
        "model": "tiny",
        "temperature": 0,
        "messages": [{"role": "user", "content": "Tell me everything"}],
    }
    whole = httpx.post(f"{url}/v1/chat/completions", json=body, headers=headers, timeout=120)
    text = whole.json()["choices"][0]["message"]["content"]
    with tab(browser, f"{url}/fleet") as opened:
        opened.page.fill("input[type=password]", "chief")
        opened.page.keyboard.press("Enter")
        opened.page.wait_for_selector(".card")
        opened.page.get_by_label("Question").fill("Tell me everything")
        opened.page.click("button:text-is('Ask')")
        opened.page.wait_for_selector(".piece")
        maker = opened.page.locator(".piece").first.get_attribute("title")
        number = int(maker.removeprefix("local-"))
        os.kill(pair.processes[number].pid, signal.SIGKILL)
        opened.page.wait_for_selector("button:text-is('Ask')")
        pieces = opened.page.locator(".piece")
        assert pieces.count() == 2
        colours = {pieces.nth(index).get_attribute("data-worker") for index in range(2)}
        assert len(colours) == 2
        assert opened.page.locator(".side .text").text_content() == text
        opened.shot("fleet-killed")
        opened.said.clear()
