"""Pages: snippets and commands run, paths and messages are there, and sizes have bounds."""

import ast
import importlib
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import anthropic
import openai
import pytest

from inlay.cli.command import Command
from inlay.cli.commands import commands, known_variables
from inlay.cli.reading import parse, read
from tests.serving import Served, serving

ROOT = Path(__file__).resolve().parent.parent
SHOWN_URL = "http://127.0.0.1:8000"
"""The address the pages show, which stands for the server's real one."""

GENERATED = ("cli.md", "api-reference.md", "metrics.md")
PAGES = sorted([ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")])
WRITTEN = [page for page in PAGES if page.name not in GENERATED]
FIRST_HOURS = [page for page in PAGES if page.parent.name == "start"]
WITH_SNIPPETS = [page for page in PAGES if "```python" in page.read_text(encoding="utf-8")]

MOST_WORDS = {
    "README.md": 700,
    "CONTRIBUTING.md": 750,
    "docs/README.md": 350,
    "docs/api.md": 5200,
    "docs/engines.md": 3550,
}
"""Words of a page at most, as `wc -w` counts them, where they are not those of its folder."""
MOST_WORDS_OF = {"docs/start": 400, "docs/deploy": 1350, "docs": 3400}
MOST_WORDS_BY_HAND = 45_200
MOST_WORDS_OF_A_PARAGRAPH = 120


def named(page: Path) -> str:
    return page.relative_to(ROOT).as_posix()


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(command="demo") as served:
        yield served


@pytest.mark.slow
@pytest.mark.parametrize("page", WITH_SNIPPETS, ids=named)
def test_every_snippet_of_a_page_runs_in_order_against_the_demo(
    page: Path, server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    names: dict[str, object] = {}
    for snippet in re.findall(
        r"^```python\n(.*?)^```", page.read_text(encoding="utf-8"), re.M | re.S
    ):
        exec(compile(snippet.replace(SHOWN_URL, server.url), str(page), "exec"), names)
    for client in names.values():
        if isinstance(client, openai.OpenAI | anthropic.Anthropic):
            client.close()
    assert capsys.readouterr().out.strip()


@pytest.mark.parametrize("page", PAGES, ids=named)
def test_every_path_a_page_names_exists(page: Path) -> None:
    paths = re.findall(
        r"`((?:docs|src|tests|benchmarks|scripts|examples)/[\w./-]+)`",
        page.read_text(encoding="utf-8"),
    )
    missing = [path for path in paths if not (ROOT / path).exists()]
    assert not missing


@pytest.mark.parametrize(("page", "most"), [("README.md", 110), ("docs/architecture.md", 120)])
def test_the_first_pages_stay_short(page: str, most: int) -> None:
    assert len((ROOT / page).read_text(encoding="utf-8").splitlines()) <= most


def test_the_readme_answers_the_first_questions_on_one_screen() -> None:
    screen = (ROOT / "README.md").read_text(encoding="utf-8").split("\n## ")[0]
    assert len(screen.splitlines()) <= 36
    for said in ("**For whom?**", "**Why not vLLM alone?**", "**What it gains:**"):
        assert said in screen
    assert len(re.findall(r"^    \S", screen, re.M)) == 2
    assert re.search(r"^\|.*\| \*\*\d+% \[\d+, \d+\]\*\* \|$", screen, re.M)


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_a_page_and_its_paragraphs_have_no_more_words_than_allowed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    folder = page.parent.relative_to(ROOT).as_posix()
    assert len(text.split()) <= MOST_WORDS.get(named(page), MOST_WORDS_OF.get(folder, 0))
    prose = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    paragraphs = re.split(r"\n\s*\n|\n(?=\s*(?:[-|#]|\d+\.) ?)", prose)
    long = [one for one in paragraphs if len(one.split()) > MOST_WORDS_OF_A_PARAGRAPH]
    assert long == []


def test_all_pages_together_have_no_more_words_than_allowed() -> None:
    words = sum(len(page.read_text(encoding="utf-8").split()) for page in WRITTEN)
    assert words <= MOST_WORDS_BY_HAND


def shown_commands(page: Path) -> list[str]:
    """Commands of inlay in blocks; lines joined, without what a pipe gives or takes."""
    text = page.read_text(encoding="utf-8").replace("\\\n", " ")
    lines = re.findall(r"^    (?:\$ )?(?:\.venv/bin/)?(inlay .*)$", text, re.M)
    return [re.split(r" [|<] ", line)[0] for line in lines if not line.startswith("inlay 0.")]


OPENED_OTHERWISE = ("architecture.md",)
"""Pages that open with a picture."""


@pytest.mark.parametrize(
    "page",
    [
        page
        for page in PAGES
        if page.parent in (ROOT / "docs", ROOT / "docs" / "start", ROOT / "docs" / "deploy")
        and page.name not in OPENED_OTHERWISE
    ],
    ids=named,
)
def test_a_page_opens_with_what_to_type(page: Path) -> None:
    opening = page.read_text(encoding="utf-8").split("\n## ")[0]
    assert re.search(r"^    \S|^```", opening, re.M)


@pytest.mark.parametrize(
    "section",
    [
        "## Responses",
        "### Kept responses",
        "## Decisions",
        "## Files and batches",
        "## Transcriptions",
    ],
)
def test_a_section_of_the_api_opens_with_a_request_to_paste(section: str) -> None:
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    _, _, after = text.partition(f"\n{section}\n\n")
    opening = after.split("\n\n")[0]
    assert opening.startswith(("    curl $U/v1/", "```python\n"))


def command_of(words: list[str]) -> Command:
    found = [one for one in commands() if one.name in (words[1], " ".join(words[1:3]))]
    return max(found, key=lambda one: len(one.name))


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_command_that_a_page_shows_is_one_inlay_takes(page: Path) -> None:
    for line in shown_commands(page):
        words = shlex.split(line, comments=True)
        if len(words) == 1 or words[1].startswith("-"):
            continue
        command = command_of(words)
        parsed = parse(command, words[1 + len(command.name.split()) :])
        if not parsed.help:
            read(command, parsed, {}, known_variables())


@pytest.mark.parametrize("page", WRITTEN, ids=named)
def test_every_flag_of_a_command_in_the_text_is_one_it_has(page: Path) -> None:
    text = " ".join(page.read_text(encoding="utf-8").split())
    for line in re.findall(r"`(inlay [a-z][^`]*--[^`]*)`", text):
        words = re.split(r"[ =]", line.split(" -- ")[0])
        command = command_of(words)
        has = {option.key for option in command.options.flags} | {"extensions", "help", "config"}
        named_here = {word.removeprefix("--") for word in words if word.startswith("--")}
        assert {name.removeprefix("no-") for name in named_here} <= has, line


OF_THE_SYSTEM = "Address already in use"


@cache
def _messages() -> list[str]:
    """Every text of the source, a format's values left out."""
    trees = [ast.parse(path.read_text(encoding="utf-8")) for path in (ROOT / "src").rglob("*.py")]
    return [
        node.value
        for tree in trees
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]


@pytest.mark.parametrize("page", FIRST_HOURS, ids=named)
def test_a_first_hour_shows_a_right_answer_and_three_errors_that_the_code_has(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    headings = re.findall(r"^## (.+)$", text, re.M)
    assert headings == ["A right answer", "Usual errors", "Where next"]
    errors = re.findall(r"^\| (?:\d+, )?`([^`]+)` \| ", text, re.M)
    assert len(errors) >= 3
    missing = [error for error in errors if not any(error in one for one in _messages())]
    assert set(missing) <= {OF_THE_SYSTEM}


@pytest.mark.parametrize("page", WRITTEN, ids=named)
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
        room = module if module.startswith("inlay_") else f"inlay.{module}"
        found = getattr(importlib.import_module(room), name)
        assert float(value.replace(",", "")) == found, (module, name)
