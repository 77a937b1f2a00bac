"""Reports of `inlay embeds audit`, opened and drawn in a real browser."""

import json
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from inlay import demo as bundled
from tests.serving import Served, serving
from tests.web.browser import PHONE, WIDE, tab

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def demo() -> Iterator[Served]:
    with serving(command="demo") as served:
        yield served


REPORTS = "input[accept='.json']"
"""Of this tab, which is drawn a moment after it is clicked: a chat has a field for files too."""


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As the command writes it."""
    path = tmp_path_factory.mktemp("audit") / "demo.json"
    command = [sys.executable, "-m", "inlay.cli", "embeds", "audit", "-o", "json"]
    command += ["--model", str(bundled.model_dir())]
    command += ["--texts", str(bundled.model_dir().parent / "texts.jsonl"), "--most-texts", "30"]
    command += ["--transform", "noise:4", "rotate", "--attackers", "nearest", "gram", "sorted"]
    done = subprocess.run(command, capture_output=True, check=True, timeout=300)
    path.write_bytes(done.stdout)
    return path


@pytest.mark.parametrize(
    ("size", "scheme"), [(WIDE, "light"), (PHONE, "dark")], ids=["wide-light", "phone-dark"]
)
def test_a_report_is_drawn_as_bars_and_two_stand_side_by_side(
    browser: Any, demo: Served, report: Path, size: tuple[int, int], scheme: str
) -> None:
    data = json.loads(report.read_bytes())
    other = report.with_name("before.json")
    other.write_bytes(report.read_bytes())
    with tab(browser, demo.url, size, scheme) as opened:
        opened.page.click(".tabs button:text('Audit')")
        sent: list[str] = []
        opened.page.on("request", lambda request: sent.append(request.url))
        opened.page.set_input_files(REPORTS, str(report))
        opened.page.locator("h2.transform").nth(1).wait_for()
        assert opened.page.locator(".side").count() == 2
        # The longest bar is as long as the share that was read.
        noise = data["transforms"][0]
        most = max(each["shares"]["tokens"]["value"] for each in noise["attackers"])
        bar = opened.page.locator(".side").first.locator(".bar rect").first
        assert float(bar.get_attribute("width")) == pytest.approx(100 * most)
        assert noise["verdict"]["word"] in opened.text(".side h3")
        opened.shot(f"audit-{scheme}")
        assert opened.violations() == []
        opened.page.get_by_label("Share of").select_option("names")
        share = next(
            each["shares"]["names"]["value"]
            for each in noise["attackers"]
            if each["attacker"] == "nearest"
        )
        first = opened.page.locator(".side").first
        nearest = first.locator("li", has_text="nearest")
        nearest.filter(has_text=f"{100 * share:.0f} %").wait_for()  # it is drawn anew
        opened.page.set_input_files(REPORTS, str(other))
        opened.page.locator(".side").nth(3).wait_for()
        opened.shot(f"audit-two-{scheme}")
        assert sent == []


def test_a_file_that_is_no_report_is_refused_with_a_word(
    browser: Any, demo: Served, report: Path
) -> None:
    data = json.loads(report.read_bytes())
    data["transforms"][0]["attackers"][0]["shares"]["tokens"]["value"] = "<b>1</b>"
    with tab(browser, demo.url) as opened:
        opened.page.click(".tabs button:text('Audit')")
        for name, content in (("a.json", b"{"), ("b.json", json.dumps(data).encode())):
            path = report.with_name(name)
            path.write_bytes(content)
            opened.page.set_input_files(REPORTS, str(path))
            opened.sees(f"{name} is no report of an audit.")
        assert opened.page.locator(".side").count() == 0
