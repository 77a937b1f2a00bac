"""The page of the workers, with two of them, one of which is killed while it answers."""

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests import adapters
from tests.live import Fleet, fleet, until
from tests.models import tiny
from tests.parts import running
from tests.serving import free_port, serving
from tests.web.browser import PHONE, WIDE, tab

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def pair() -> Iterator[Fleet]:
    engine: dict[str, Any] = {"dtype": "float32", "enable_sleep_mode": True, "enable_lora": True}
    with fleet(tiny("llama"), workers=2, max_lora_rank=8, **engine) as running:
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
        assert (worker["share"], len(worker["weights_id"]) >= 8) == (1.0, True)
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


def test_adapters_are_loaded_and_unloaded_on_every_worker(
    browser: Any, url: str, tmp_path: Path
) -> None:
    lora = adapters.make_lora(tmp_path, tiny("llama"))
    with tab(browser, f"{url}/fleet") as opened:
        opened.page.fill("input[type=password]", "chief")
        opened.page.keyboard.press("Enter")
        opened.page.wait_for_selector(".card")
        opened.said.clear()
        opened.page.get_by_label("Name").fill("mine")
        opened.page.get_by_label("Directory or address").fill(str(tmp_path / "none"))
        opened.page.get_by_role("button", name="Load", exact=True).click()
        opened.sees("There is no such thing.")
        assert "it has no adapter_config.json" in opened.text(".said")
        opened.page.click("button:text('Dismiss')")
        opened.page.get_by_label("Directory or address").fill(str(lora))
        opened.page.get_by_role("button", name="Load", exact=True).click()
        opened.sees("Load: done")
        for index in range(2):
            opened.page.locator(".card").nth(index).get_by_text("mine").wait_for()
        opened.page.get_by_role("button", name="Unload").click()
        opened.sees("Unload: done")
        opened.page.locator(".card").get_by_text("mine").first.wait_for(state="detached")
        assert all("400" in line or "404" in line for line in opened.said)
        opened.said.clear()


def test_a_worker_of_a_fleet_is_drained_and_its_card_says_that_it_is_gone(
    browser: Any, tmp_path: Path
) -> None:
    port = free_port()
    names = ("--nats", f"nats://127.0.0.1:{port}", "--namespace", "drained")
    echo = ("worker", tiny("llama"), "--engine", "echo", *names)
    with (
        running("nats", "--port", port, "--store-dir", tmp_path, until="NATS at nats://"),
        running(*echo, until=" serves ") as first,
        running(*echo, until=" serves ") as other,
        serving(*names, "--api-key", "user", "--admin-api-key", "chief", command="frontend") as one,
        tab(browser, f"{one.url}/fleet") as opened,
    ):
        opened.page.fill("input[type=password]", "chief")
        opened.page.keyboard.press("Enter")
        opened.page.locator(".card").nth(1).wait_for()
        opened.said.clear()
        opened.page.locator(".card").first.get_by_role("button", name="Drain").click()
        opened.sees("then its process ends")
        opened.page.click("button:text('Yes, drain')")
        opened.page.wait_for_selector(".card[data-gone]")
        assert opened.page.locator(".card:not([data-gone])").count() == 1
        opened.shot("fleet-drained")
        assert opened.violations() == []
        until(lambda: {first.process.poll(), other.process.poll()} == {None, 0})


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
