"""Commands of the pages about deployment, the notes of the chart and the runbooks: each is tried.

Those of inlay are read by inlay, in a pod with what the pod has; charts are rendered, files are
there, and programs that nobody here has are named.
"""

import re
import shlex
from pathlib import Path

import pytest
import yaml

from inlay.cli.commands import commands, known_variables
from inlay.cli.reading import parse, read
from tests.commands import run
from tests.deploy.chart import CHART
from tests.deploy.test_chart import one, rendered, settings_of
from tests.deploy.tools import ROOT, helms

pytestmark = pytest.mark.deploy

PAGES = sorted((ROOT / "docs" / "deploy").glob("*.md"))
NOTES = CHART / "templates" / "NOTES.txt"
COMPOSE = yaml.safe_load((ROOT / "deploy" / "compose" / "compose.yaml").read_text())
DOCKERFILE = (ROOT / "deploy" / "docker" / "Dockerfile").read_text()
SYSTEM = {"systemctl", "useradd", "curl", "python3", "export"}
"""Programs of the system: what their words mean is not ours."""


def commands_of(page: Path) -> list[str]:
    """Lines of code blocks, joined where a quote or a backslash goes on, without comments."""
    text = re.sub(r"```.*?```", "", page.read_text(), flags=re.DOTALL)
    blocks = re.findall(r"(?:^|\n)((?:    \S.*\n(?:            .*\n)*)+)", text)
    found: list[str] = []
    for line in "".join(blocks).splitlines():
        line = line.strip()
        if found and (found[-1].count("'") % 2 or found[-1].endswith("\\")):
            found[-1] = f"{found[-1]} {line}"
        else:
            found.append(line)
    return [part.strip() for line in found for part in re.split(r" && | \| ", line)]


COMMANDS = [(page.name, command) for page in PAGES for command in commands_of(page)]


def test_there_are_commands_on_every_page() -> None:
    assert {name for name, _ in COMMANDS} == {page.name for page in PAGES}
    assert "env -u INLAY_CONFIG" not in NOTES.read_text()
    assert re.search(r"kubectl .* exec deploy/.*-frontend -- inlay status\n", NOTES.read_text())


@pytest.mark.parametrize(("page", "command"), COMMANDS, ids=lambda value: str(value)[:60])
def test_a_command_of_the_pages_is_one(page: str, command: str, tmp_path: Path) -> None:
    found = helms()
    if not found:
        pytest.skip("no Helm is there: make test-deploy fetches it")
    helm = next(iter(found.values()))
    assigned = re.fullmatch(r"(\w+)=(.*)", command)
    if assigned is not None:
        read_file = re.fullmatch(r"\$\(cat (.+)\)", assigned[2])
        assert assigned[2].startswith("'[") or (read_file and (ROOT / read_file[1]).is_file())
        return
    words = shlex.split(command.partition("   #")[0].replace("< ", "<").replace("> ", ">"))
    words = [word for word in words if not word.startswith((">", "<"))]
    match words:
        case ["inlay", *rest]:
            taken(rest)
        case ["make", target]:
            assert f"\n{target}:" in (ROOT / "Makefile").read_text()
        case ["helm", "install" | "upgrade", name, chart, *rest]:
            render(helm, name, chart, rest, tmp_path)
        case ["docker", "build", "-f", file, "--target", stage, "-t", _, "."]:
            assert (ROOT / file).is_file()
            assert f" AS {stage}\n" in DOCKERFILE
        case ["docker", "compose", "-f", file, *rest]:
            assert (ROOT / file).is_file()
            if rest[0] == "exec":
                services = [word for word in rest[1:] if not word.startswith("-")]
                assert services[0] in COMPOSE["services"]
        case ["kubectl", "exec", *rest]:
            before, inside = rest[: rest.index("--")], rest[rest.index("--") + 1 :]
            assert before[-1] == "deploy/inlay-frontend"
            executed(helm, inside, tmp_path)
        case ["kubectl", "get" | "create" | "patch" | "describe", *_]:
            pass
        case ["cp", source, _] | ["/opt/inlay/bin/python3", source, _]:
            assert list(ROOT.glob(source))
        case ["/opt/inlay/bin/pip", "install", extras]:
            assert extras == ".[torch,nats]"
        case [program, *_]:
            assert program in SYSTEM, f"{page}: what is {command!r}?"


def taken(words: list[str]) -> None:
    """Have inlay read the words of one of its commands."""
    names = sorted((command.name for command in commands()), key=len, reverse=True)
    name = next(name for name in names if " ".join(words).startswith(name))
    command = next(command for command in commands() if command.name == name)
    read(command, parse(command, words[len(name.split()) :]), {}, known_variables())


def executed(helm: str, words: list[str], directory: Path) -> None:
    """Have what a frontend's pod has read the words that are run in it."""
    pool = {"name": "small", "model": {"path": "Qwen/Qwen3-0.6B"}}
    frontend = one(rendered(helm, directory, workers=[pool]), "Deployment inlay-frontend")
    match words:
        case ["inlay", name]:
            assert (
                settings_of(frontend, directory, name).fleet
                == settings_of(frontend, directory).fleet
            )
        case ["python3", "-c", "$script", "backup" | "restore"]:
            pass  # test_backup.py
        case _:
            raise AssertionError(words)


def render(helm: str, name: str, chart: str, rest: list[str], directory: Path) -> None:
    """Render what `helm install` with these words would; NAME stands for each recipe."""
    page = (ROOT / "docs" / "deploy" / "README.md").read_text()
    (values,) = re.findall(r"```yaml\n# my\.yaml\n(.*?)```", page, re.DOTALL)
    (directory / "my.yaml").write_text(values)
    recipes = sorted((ROOT / "deploy" / "recipes").glob("*.yaml"))
    texts = [path.stem for path in recipes] if "NAME" in " ".join(rest) else [""]
    for recipe in texts:
        words = [word.replace("NAME", recipe) for word in rest]
        words = [str(directory / word) if word == "my.yaml" else word for word in words]
        words = [str(ROOT / word) if word.startswith("deploy/") else word for word in words]
        words = [word for word in words if word != "--create-namespace"]
        assert "kind: Deployment" in run(helm, "template", name, ROOT / chart, *words)
