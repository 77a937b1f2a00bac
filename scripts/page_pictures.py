"""Take the pictures of the playground in README.md and docs/ from a server of the demo.

    inlay demo                                             # in another terminal
    python -m scripts.page_pictures http://127.0.0.1:8000

Needs Chromium and playwright (of the group test). The pictures are to be looked at.
"""

import argparse
import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from playwright.sync_api import sync_playwright
from safetensors.numpy import save_file

from inlay import demo
from inlay.client import PromptEmbedder

DOCS = Path(__file__).parents[1] / "docs"
KNOWN, INVENTED = "Tell me about Koso.", "Tell me about Kosa."
"""A person of the model's world, and one whom it has to make up."""
CHOSEN = 7
"""Number of the token whose alternatives are shown."""


def ask(page: Any, text: str) -> None:
    """Send a message and wait until it is answered."""
    turns = page.locator(".turn").count()
    page.fill("#draft", text)
    page.keyboard.press("Enter")
    page.locator(".positions").nth(turns).wait_for()
    page.wait_for_selector("button:text('Send')")


def chat(page: Any, rows: Path) -> None:
    """Show a chat with a file of embeddings, what was cached, and how sure each token is."""
    page.set_input_files("input[type=file]", str(rows))
    page.wait_for_function("() => document.querySelector('#draft').value")
    ask(page, page.input_value("#draft"))
    ask(page, KNOWN)
    page.locator(".positions summary").last.click()
    page.locator(".tokens").first.focus()
    for _ in range(CHOSEN):
        page.keyboard.press("ArrowRight")
    page.evaluate("document.activeElement.blur()")
    page.mouse.move(0, 0)


def noise(page: Any) -> None:
    """Show what noise hides and what it costs."""
    page.click(".tabs button:text('Noise')")
    page.fill("#noisy", "What tool does Gola use?")
    page.click("button:text('Try all levels')")
    page.wait_for_selector("td button:text-is('16')")
    page.wait_for_selector("button:text('Try all levels')")
    page.mouse.move(0, 0)


def take(url: str) -> None:
    """Write the pictures into docs/."""
    chromium = shutil.which("chromium") or shutil.which("chromium-browser")
    embedder = PromptEmbedder.from_pretrained(demo.model_dir())
    with tempfile.TemporaryDirectory() as folder, sync_playwright() as playwright:
        rows = Path(folder) / "kosa.safetensors"
        save_file({"prompt_embeds": np.asarray(embedder.embed(INVENTED).rows, np.float32)}, rows)
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        for scheme, end in (("light", ""), ("dark", "-dark")):
            page = browser.new_page(
                viewport={"width": 1160, "height": 400},
                color_scheme=scheme,
                reduced_motion="reduce",
            )
            page.goto(url)
            page.wait_for_selector("select option:text('inlay-demo')", state="attached")
            chat(page, rows)
            page.screenshot(path=DOCS / f"playground{end}.png", full_page=True)
            noise(page)
            page.screenshot(path=DOCS / f"noise{end}.png", full_page=True)
        browser.close()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("url")
    take(parser.parse_args().url)
