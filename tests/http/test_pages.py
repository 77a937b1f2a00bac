"""The pages for people: what may run in them, and what a browser makes of them."""

import base64
import hashlib
import json
import re
import shutil
import subprocess
from collections.abc import Callable
from html import unescape
from pathlib import Path

import httpx
import pytest

from tests.embedding_models import tiny_embedding, tiny_scoring
from tests.live import Fleet, fleet

CHROMIUM = (
    shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
)
QUIET = (
    "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking",
    "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--virtual-time-budget=5000", "--dump-dom",
)  # fmt: skip


@pytest.mark.parametrize("path", ["/start", "/docs"])
def test_only_the_pages_own_scripts_may_run_and_nobody_may_frame_them(url: str, path: str) -> None:
    response = httpx.get(url + path)
    policy = dict(
        directive.strip().split(" ", 1)
        for directive in response.headers["content-security-policy"].split(";")
    )
    assert (policy["default-src"], policy["frame-ancestors"], policy["base-uri"]) == ("'none'",) * 3
    assert "unsafe" not in response.headers["content-security-policy"]
    for tag, directive in (("script", "script-src"), ("style", "style-src")):
        (content,) = re.findall(f"<{tag}>(.*?)</{tag}>", response.text, re.DOTALL)
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        # Beside them the sheet of all pages, and no script of another file.
        shared = "'self' " if tag == "style" else ""
        assert policy[directive] == f"{shared}'sha256-{digest}'"
    assert response.headers["x-content-type-options"] == "nosniff"
    assert response.headers["referrer-policy"] == "no-referrer"
    # Attributes that would run script are beyond any hash.
    assert not re.search(r"\son\w+=|\sstyle=|javascript:", response.text)


def shown(url: str, folder: Path) -> tuple[str, list[str]]:
    """(the page as its scripts have made it, what it said on the console)."""
    assert CHROMIUM is not None
    done = subprocess.run(
        [CHROMIUM, *QUIET, f"--user-data-dir={folder}", url],
        capture_output=True,
        text=True,
        timeout=180,
    )
    return done.stdout, [line for line in done.stderr.splitlines() if "CONSOLE" in line]


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
@pytest.mark.parametrize(
    ("path", "route"),
    [
        (lambda: tiny_embedding("qwen3"), "/v1/embeddings"),
        (lambda: tiny_scoring("bert"), "/v1/rerank"),
        (lambda: tiny_scoring("distilbert", 3), "/classify"),
    ],
    ids=["embeddings", "rerank", "classify"],
)
def test_the_page_shows_a_request_that_the_model_answers(
    path: Callable[[], Path], route: str, tmp_path: Path
) -> None:
    with fleet(path()) as running:
        url = running.serve(enable_prompt_embeds=True)
        home, said = shown(url + "/start", tmp_path)
        assert said == []
        example = re.search(
            rf"curl {re.escape(url + route)} -H .*? -d '(.*?)'</code>", home, re.DOTALL
        )
        assert example is not None, home
        answer = httpx.post(url + route, json=json.loads(unescape(example[1])), timeout=180)
        assert answer.status_code == 200, answer.text
        # The example with embeddings as a prompt is of completions, which this model does not
        # serve.
        assert '<div id="embeddings" hidden="">' in home


@pytest.mark.slow
@pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")
def test_a_browser_shows_the_pages_without_complaint(
    llama: Fleet, url: str, tmp_path: Path
) -> None:
    home, said = shown(url + "/start", tmp_path)
    assert said == []
    for text in (
        "<dd>org/tiny</dd>",
        "512 positions",
        "up to 10.0 MB a prompt",
        f"{url}/v1/chat/completions",
    ):
        assert text in home
    docs, said = shown(url + "/docs", tmp_path)
    assert said == []
    for text in (
        'id="post-v1-completions"',
        "takes precedence",
        ">admin</span>",
        "Answer, text/event-stream: ChatChunk",
    ):
        assert text in docs
    locked, said = shown(llama.serve(api_key=["one"]) + "/start", tmp_path)
    assert said == []
    assert "asks for an API key" in locked
    assert "authorization: Bearer $KEY" in locked
    assert "/v1/models -H" in locked
    # What a script that may not run would have said.
    forbidden = tmp_path / "page.html"
    forbidden.write_text(
        "<meta http-equiv='content-security-policy' content='script-src none'><script>1</script>"
    )
    assert len(shown(forbidden.as_uri(), tmp_path)[1]) >= 1
