"""Snippets of the documentation run, and paths that it names exist."""

import importlib
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Served, serving

ROOT = Path(__file__).resolve().parent.parent
SHOWN_URL = "http://127.0.0.1:8000"
"""The address the pages show, which stands for the server's real one."""

PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").glob("*.md")])
WITH_SNIPPETS = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(command="demo") as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=lambda page: page.name)
def test_every_snippet_of_a_page_runs_in_order_against_the_demo(
    page: Path, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    for snippet in re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S
    ):
        exec(compile(snippet.replace(SHOWN_URL, server.url), str(page), "exec"), names)
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_path_a_page_names_exists(page: Path) -> None:
    named = re.findall(
        r"`((?:docs|src|tests|benchmarks|scripts|examples)/[\w./-]+)`",
        page.read_text(encoding="utf-8"),
    )
    missing = [path for path in named if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize(("page", "most"), [("README.md", 149), ("docs/architecture.md", 120)])
def test_the_first_pages_stay_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


WRITTEN = [page for page in PAGES if page.name not in ("cli.md", "api-reference.md")]
"""Pages that are not made from the code."""


@pytest.mark.parametrize("page", WRITTEN, ids=lambda page: page.name)
def test_lines_of_text_end_at_100(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.M | re.S)
    # Tables, headings and code cannot be wrapped.
    lines = [line for line in text.splitlines() if not re.match(r"    |\s*[|#<]", line)]
    assert [line for line in lines if len(line) > 100] == []


def test_nothing_that_was_measured_is_called_safe() -> None:
    """A measure by known attacks is a lower bound, whatever it finds."""
    text = (ROOT / "docs" / "privacy.md").read_text(encoding="utf-8").lower()
    words = r"\b(private|irreversible|anonymous|guarantee\w*)\b|(?<![\d.])0(\.0)? ?%"
    assert re.findall(words, text) == []


def test_the_bounds_of_the_security_page_are_those_of_the_code() -> None:
    text = (ROOT / "docs" / "security.md").read_text(encoding="utf-8")
    said = re.findall(r"`([a-z_.]+)\.([A-Z_]+)` = ([\d,.]+\d)", text)
    assert len(said) > 20
    for module, name, value in said:
        found = getattr(importlib.import_module(f"inlay.{module}"), name)
        assert float(value.replace(",", "")) == found, (module, name)
