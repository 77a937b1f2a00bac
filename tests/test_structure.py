"""The import arrows of docs/architecture.md hold, and what must not need torch does not."""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parent.parent / "src" / "inlay"

BASE = {"prompt", "digest", "errors", "pace", "fair_queue", "liveness", "lazy", "single_flight"}
BASE |= {"address", "hidden_states"}
MESSAGES = {"request", "card", "commands", "outputs", "refusals", "resuming", "routing"}
SHARED = BASE | MESSAGES
MAY_IMPORT = {
    "prompt": {"errors"},
    "errors": set[str](),
    "pace": set[str](),
    "hidden_states": set[str](),
    "address": set[str](),
    "liveness": set[str](),
    "lazy": set[str](),
    "fair_queue": set[str](),
    "single_flight": set[str](),
    "digest": {"prompt", "errors", "pace"},
    "request": BASE,
    "card": BASE | {"request", "media", "stages"},
    "commands": BASE | {"card"},
    "outputs": BASE | {"request"},
    "refusals": BASE | {"request", "card"},
    "resuming": BASE | {"request", "card"},
    "routing": BASE | {"request", "card"},
    "stages": {"errors"},
    "tensors": SHARED,
    "media": BASE | {"tensors"},
    "render": SHARED,
    "transport": SHARED | {"stages"},
    "router": SHARED | {"transport", "stages"},
    "telemetry": {"errors"},
    "store": SHARED | {"tensors"},
    "http": SHARED
    | {"embedding", "media", "tensors", "render", "router", "transport", "store", "telemetry"}
    | {"web"},
    "api": SHARED
    | {"http", "embedding", "media", "tensors", "render"}
    | {"router", "transport", "store", "telemetry", "stages"},
    "adapter": SHARED | {"tensors"},
    "embedding": SHARED,
    "worker": SHARED | {"stages", "telemetry", "transport", "engine", "adapter", "tensors"},
    "engine": SHARED | {"embedding", "media", "tensors", "render", "adapter"},
    "client": SHARED | {"media", "tensors", "render"},
    "demo": set[str](),
    "web": set[str](),
}
SCHEMAS = {"inlay.errors", "inlay.card", "inlay.api.schema", "inlay.api.openai.schema"}
SCHEMAS |= {"inlay.api.anthropic.schema"}
"""What request and response types may import, so that they are usable without the server."""

APIS = {"openai", "anthropic", "admin"}

HEAVY = {"llguidance", "torch", "transformers", "safetensors", "vllm", "sglang", "diffusers"}
HEAVY_MAY_BE_IN = {"engine"}
MAX_LINES = 500
MAX_COLUMNS = 100


def room_of(path: Path) -> str:
    return path.relative_to(SOURCE).parts[0].removesuffix(".py")


def imports_of(path: Path) -> set[str]:
    """Dotted names `path` imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


FILES = sorted(
    path for path in SOURCE.rglob("*.py") if path.parent != SOURCE or path.stem in MAY_IMPORT
)


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_room_imports_only_the_rooms_it_may_know(path: Path) -> None:
    room = room_of(path)
    if room == "cli":
        return
    inner = {name.split(".")[1] for name in imports_of(path) if name.startswith("inlay.")}
    assert inner - {room, "__version__"} <= MAY_IMPORT[room]


@pytest.mark.parametrize("path", [path for path in FILES if room_of(path) == "api"], ids=str)
def test_an_api_knows_no_other_and_what_they_share_knows_none(path: Path) -> None:
    inside = path.relative_to(SOURCE / "api").parts[0]
    if inside == "app.py":
        return
    known = {name.split(".")[2] for name in imports_of(path) if name.startswith("inlay.api.")}
    assert known & APIS <= {inside}


def test_schemas_import_no_server() -> None:
    paths = [path for path in FILES if path.parent.name == "schema" or path.stem == "schema"]
    assert len(paths) > 10
    for path in paths:
        inner = {name for name in imports_of(path) if name.startswith("inlay.")}
        assert all(name.rpartition(".")[0].startswith(tuple(SCHEMAS)) for name in inner), path


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_heavy_libraries_stay_in_the_engines(path: Path) -> None:
    heavy = {name.split(".")[0] for name in imports_of(path)} & HEAVY
    assert not heavy or room_of(path) in HEAVY_MAY_BE_IN


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_file_outgrows_a_reader(path: Path) -> None:
    lines = path.read_text(encoding="utf-8").splitlines()
    assert len(lines) <= MAX_LINES
    assert [line for line in lines if len(line) > MAX_COLUMNS] == []


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_no_wait_loses_that_it_was_cancelled(path: Path) -> None:
    """Until Python 3.12 `asyncio.wait_for` drops a cancellation that comes with the result.

    `asyncio.timeout` does not.
    """
    assert "asyncio.wait_for(" not in path.read_text(encoding="utf-8")


QUESTIONS = {"What", "Whose", "Who", "Whom", "Whether", "How", "When", "Where"}


@pytest.mark.parametrize("path", FILES, ids=lambda path: str(path.relative_to(SOURCE)))
def test_a_docstring_opens_with_a_noun_or_an_imperative(path: Path) -> None:
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
            text = node.value.value
            assert not isinstance(text, str) or text.split()[0] not in QUESTIONS, text


def test_every_room_is_known() -> None:
    rooms = {room_of(path) for path in FILES}
    assert rooms - {"cli"} <= set(MAY_IMPORT)


@pytest.mark.parametrize(
    "module",
    [
        "inlay.api.app",
        "inlay.http.serve",
        "inlay.embedding.config",
        "inlay.media.families",
        "inlay.client",
        "inlay.cli",
        "inlay.worker",
        "inlay.router",
    ],
)
def test_what_faces_clients_starts_without_torch(module: str) -> None:
    """In an interpreter where the heavy libraries cannot be imported at all."""
    script = f"""
import sys

class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in {HEAVY!r}:
            raise ModuleNotFoundError(name, name=name)

sys.meta_path.insert(0, Absent())
import {module}
"""
    subprocess.run([sys.executable, "-c", script], check=True, timeout=180)
