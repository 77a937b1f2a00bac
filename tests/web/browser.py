"""Debian's Chromium, driven by playwright; what it says on its console is kept."""

import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser")
AXE = Path(__file__).parent / "vendor" / "axe.min.js"
SHOTS = Path(__file__).resolve().parents[2] / "build" / "screenshots"
WIDE, PHONE = (1280, 900), (390, 844)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Chromium for a module; while playwright runs, its loop keeps tests of asyncio from running."""
    if CHROMIUM is None:
        pytest.skip("needs Chromium")
    api = pytest.importorskip("playwright.sync_api")
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-gpu"]
        )
        yield chromium
        chromium.close()


@dataclass
class Tab:
    """A tab of a browser, and what it said."""

    page: Any
    said: list[str] = field(default_factory=list)

    def shot(self, name: str) -> None:
        """Keep a picture of the whole page, for people to look at."""
        SHOTS.mkdir(parents=True, exist_ok=True)
        self.page.screenshot(path=SHOTS / f"{name}.png", full_page=True)

    def violations(self) -> list[str]:
        """What axe finds against WCAG 2.2 A and AA."""
        # The page's policy lets no foreign script in; this way past it is the driver's own.
        self.page.evaluate(AXE.read_text(encoding="utf-8"))
        found = self.page.evaluate(
            """axe.run(document, {runOnly: ["wcag2a", "wcag2aa", "wcag21aa", "wcag22aa"]})"""
        )
        return [
            f"{one['id']}: {node['target']} {node['failureSummary']}"
            for one in found["violations"]
            for node in one["nodes"]
        ]

    def text(self, selector: str) -> str:
        """Text of the first element, once it is there."""
        return str(self.page.locator(selector).first.inner_text())

    def sees(self, text: str) -> None:
        """Wait until `text` is shown."""
        self.page.get_by_text(text).first.wait_for()


@contextmanager
def tab(
    browser: Any, url: str, size: tuple[int, int] = WIDE, scheme: str = "light"
) -> Iterator[Tab]:
    """Open `url`; what went wrong in it fails the test when it ends, unless it is cleared."""
    width, height = size
    context = browser.new_context(
        viewport={"width": width, "height": height}, color_scheme=scheme, reduced_motion="reduce"
    )
    opened = Tab(context.new_page())
    opened.page.set_default_timeout(180_000)
    opened.page.on("console", lambda message: opened.said.append(message.text))
    opened.page.on("pageerror", lambda error: opened.said.append(str(error)))
    try:
        opened.page.goto(url)
        yield opened
        assert opened.said == []
    finally:
        context.close()
