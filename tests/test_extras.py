"""The name on PyPI: `inlay` there is another project."""

import re
import tomllib
from pathlib import Path

from inlay.base import extras

ROOT = Path(__file__).resolve().parent.parent
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
READ = {".py", ".md", ".toml", ".yaml", ".yml", ".sh", ".html", ".mjs", ".txt", ".json", ".service"}


def _texts() -> dict[str, str]:
    folders = ("src", "docs", "deploy", "examples", "scripts", "benchmarks", ".github")
    files = [ROOT / name for name in ("README.md", "CONTRIBUTING.md", "Makefile")]
    files += [file for folder in folders for file in (ROOT / folder).rglob("*")]
    return {
        str(file.relative_to(ROOT)): file.read_text(encoding="utf-8")
        for file in files
        if file.is_file() and (file.suffix in READ or file.name in {"Makefile", "Dockerfile"})
    }


def test_the_distribution_of_printed_commands_is_the_projects() -> None:
    assert PROJECT["name"] == extras.DISTRIBUTION != "inlay"
    assert PROJECT["scripts"] == {"inlay": "inlay.cli:main"}
    assert extras.install("torch", "nats") == "pip install 'inlay-server[torch,nats]'"


def test_nothing_tells_anyone_to_install_another_project() -> None:
    wrong = re.compile(
        r"""(?:pipx?|uv|tool)\s+install\s[^\n]*?['"\s]inlay(?:['"\s\[=<>~]|$)|(?<![\w.-])inlay\[[a-z]"""
    )
    texts = _texts()
    assert len(texts) > 300
    found = [f"{name}: {hit[0]}" for name, text in texts.items() for hit in wrong.finditer(text)]
    assert found == []


def test_extras_of_printed_commands_exist() -> None:
    named = [
        extra
        for text in _texts().values()
        for call in re.findall(r"""extras\.install\(([^)]*)\)|['"]\.\[([a-z,]+)\]""", text)
        for extra in re.findall(r"[a-z]+", "".join(call))
    ]
    assert len(named) > 15
    assert set(named) <= set(PROJECT["optional-dependencies"])
