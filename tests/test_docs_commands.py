"""Commands of the pages that are not inlay's own: routes, programs and files they name are there."""

import ast
import json
import re
import shlex
from importlib.util import find_spec
from pathlib import Path

import msgspec
import pytest
import yaml

from inlay.api.app import routes
from tests.test_docs import ROOT, WRITTEN, named

EXAMPLES = ROOT / "examples" / "README.md"
SHOWN = [page for page in [*WRITTEN, EXAMPLES] if page.parent.name != "deploy"]
"""The pages of the folder `deploy` have suites of their own."""


def blocks(page: Path) -> list[tuple[str, str]]:
    """(language, text) of each block of code; one that is indented has none."""
    found: list[tuple[str, list[str]]] = []
    fenced = inside = False
    for line in page.read_text(encoding="utf-8").splitlines():
        if line.startswith("```"):
            fenced, inside = not fenced, False
            if fenced:
                found.append((line[3:], []))
        elif fenced:
            found[-1][1].append(line)
        elif line.startswith("    "):
            if not inside:
                found.append(("", []))
            found[-1][1].append(line[4:])
            inside = True
        else:
            inside = False
    # A line goes on behind a backslash.
    return [(language, re.sub(r"\\\n\s*", "", "\n".join(lines))) for language, lines in found]


def joined(block: str) -> list[str]:
    """Lines of a block without comments; one whose quotes are open goes on."""
    found: list[str] = []
    for line in block.splitlines():
        if found and found[-1].count("'") % 2:
            found[-1] += f"\n{line}"
        elif line and not line.startswith("#"):
            found.append(line)
    return found


def commands(program: str) -> list[tuple[str, list[str]]]:
    """(page, words) of each command of a program; quotes may go over lines."""
    found = []
    for page in SHOWN:
        for language, block in blocks(page):
            for line in joined(block) if language in ("", "sh") else ():
                words = shlex.split(line, comments=True) if line.startswith(program) else []
                if words[:1] == [program]:
                    found.append((named(page), words))
    return found


PATTERNS = [
    (operation, re.compile(re.sub(r"\{\w+\}", "[^/]+", operation.path)))
    for operation, _ in routes()
]


def path_of(word: str) -> str:
    return re.sub(r"^(?:\$U|\$ADMIN|https?://[^/]*)", "", word).partition("?")[0]


@pytest.mark.parametrize(("page", "words"), commands("curl"), ids=str)
def test_a_request_of_a_page_goes_to_a_route_and_has_its_fields(
    page: str, words: list[str]
) -> None:
    (address,) = [word for word in words if re.match(r"\$U|\$ADMIN|http", word)]
    body = words[words.index("-d") + 1] if "-d" in words else None
    sends = body is not None or "-F" in words or "--data-binary" in words
    method = "post" if sends else "get"
    found = [
        operation
        for operation, pattern in PATTERNS
        if pattern.fullmatch(path_of(address)) and operation.method.lower() == method
    ]
    assert found, f"{page}: {method} {path_of(address)}"
    kind = found[0].request
    if body is not None and isinstance(kind, type):
        fields = {field.encode_name for field in msgspec.structs.fields(kind)}
        assert set(json.loads(body)) <= fields
        msgspec.json.decode(body, type=kind)


@pytest.mark.parametrize(("page", "words"), commands("python"), ids=str)
def test_a_program_that_a_page_runs_is_there_with_its_flags(page: str, words: list[str]) -> None:
    if words[1] == "-m":
        assert find_spec(words[2]) is not None
        if words[2] == "benchmarks":
            assert all((ROOT / "benchmarks" / f"{name}.py").exists() for name in words[3:])
        return
    source = (ROOT / words[1]).read_text(encoding="utf-8")
    flags = [word.partition("=")[0] for word in words if word.startswith("--")]
    assert [flag for flag in flags if f'"{flag}"' not in source] == []


@pytest.mark.parametrize(("page", "words"), commands("make"), ids=str)
def test_a_target_that_a_page_makes_is_there(page: str, words: list[str]) -> None:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    assert all(re.search(rf"^{word}:", makefile, re.M) for word in words[1:] if "=" not in word)


def test_json_yaml_and_python_of_the_pages_are_read() -> None:
    count = 0
    for page in SHOWN:
        for language, block in blocks(page):
            if language == "yaml":
                assert yaml.safe_load(block)
                count += 1
            if block.startswith('{"'):
                for line in re.split(r"\n(?=\S)", block.strip()):
                    # Three dots stand for what is left out of a list or an object.
                    json.loads(re.sub(r"(?:, )?\.\.\.(?=[\]}])", "", line))
                    count += 1
            if re.match(r"(?:from|import|client|answer) ?[\w.]* ?", block):
                ast.parse(block)
                count += 1
    assert count > 5
