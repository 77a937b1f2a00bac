"""The import arrows of docs/architecture.md hold, and what must not need torch does not."""

import ast
import re
import subprocess
import sys
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import TypeAlias

import pytest

PACKAGES = Path(__file__).resolve().parent.parent / "src"
SOURCE = PACKAGES / "inlay"
EXTENSIONS = ("inlay_audit", "inlay_batches", "inlay_stages", "inlay_state", "inlay_tools")

BASE = {"prompt", "digest", "errors", "pace", "fair_queue", "liveness", "lazy", "single_flight"}
BASE |= {"parent", "address", "edges", "hidden_states", "blocks", "slots", "build"}
BASE |= {"pooling", "watched", "lru", "membership", "at_most", "user_cache", "allocator"}
MESSAGES = {"request", "card", "commands", "fields", "limits", "outputs", "priority", "refusals"}
MESSAGES |= {"resuming", "routing"}
SHARED = BASE | MESSAGES
OF_ROOMS = (["base"], ["messages"])
"""Packages each module of which is a room."""
MAY_IMPORT = {
    "__init__": set[str](),
    "prompt": {"errors"},
    "errors": set[str](),
    "extras": set[str](),
    "pace": set[str](),
    "blocks": set[str](),
    "build": set[str](),
    "watched": {"errors"},
    "parent": set[str](),
    "hidden_states": set[str](),
    "pooling": {"errors"},
    "address": set[str](),
    "extension": {"errors"},
    "edges": {"address"},
    "membership": set[str](),
    "liveness": set[str](),
    "lazy": set[str](),
    "allocator": set[str](),
    "at_most": set[str](),
    "user_cache": set[str](),
    "fair_queue": set[str](),
    "lru": set[str](),
    "slots": {"fair_queue"},
    "single_flight": {"pace"},
    "digest": {"prompt", "errors", "pace"},
    "request": BASE | {"extension"},
    "card": BASE | {"request", "fields", "media", "extension"},
    "commands": BASE | {"card"},
    "outputs": BASE | {"request"},
    "fields": {"errors"},
    "limits": {"errors"},
    "priority": set[str](),
    "refusals": BASE | {"request", "card", "fields"},
    "resuming": BASE | {"request", "card"},
    "routing": BASE | {"request", "card"},
    "tensors": SHARED,
    "media": BASE | {"tensors"},
    "render": SHARED | {"tensors"},
    "transport": SHARED,
    "router": SHARED | {"transport", "extension"},
    "telemetry": {"errors"},
    "store": SHARED | {"tensors"},
    "http": SHARED
    | {"embedding", "media", "tensors", "render", "router", "transport", "store", "telemetry"}
    | {"web", "extension"},
    "api": SHARED
    | {"http", "embedding", "media", "tensors", "render"}
    | {"router", "transport", "store", "telemetry", "extension"},
    "adapter": SHARED | {"tensors"},
    "embedding": SHARED | {"tensors"},
    "worker": SHARED | {"telemetry", "transport", "engine", "adapter", "tensors", "extension"},
    "engine": SHARED | {"embedding", "media", "tensors", "render", "adapter", "store", "extension"},
    "client": SHARED | {"media", "tensors", "render"},
    "demo": set[str](),
    "web": set[str](),
}
MAY_IMPORT["cli"] = {*MAY_IMPORT} | {"extension"}
MAY_IMPORT["inlay_stages"] = {*MAY_IMPORT}
MAY_IMPORT["inlay_tools"] = {*MAY_IMPORT}
MAY_IMPORT["inlay_batches"] = {*MAY_IMPORT} - {"inlay_stages"}
MAY_IMPORT["inlay_state"] = {*MAY_IMPORT} - {"inlay_batches", "inlay_stages"}
MAY_IMPORT["inlay_audit"] = {"errors", "client", "tensors", "cli", "extension", "inlay_tools"}
"""By room: a module or package of `inlay`, or an extension beside it."""
OF_ALL = {"__version__", "extras"}
"""What the package is called and its version: every room may say them."""

SCHEMAS = {
    "inlay.base.errors",
    "inlay.messages.card",
    "inlay.api.schema",
    "inlay.api.openai.schema",
}
SCHEMAS |= {"inlay.api.anthropic.schema", "inlay.messages.fields"}
"""What request and response types may import, so that they are usable without the server."""

APIS = {"openai", "anthropic", "admin"}

HEAVY = {
    "llguidance",
    "torch",
    "transformers",
    "safetensors",
    "vllm",
    "vllm_omni",
    "sglang",
    "diffusers",
}
HEAVY_MAY_BE_IN = ("inlay/engine/", "inlay_audit/neural/", "inlay_stages/engines/")
MAX_LINES = 500
MAX_COLUMNS = 100
SHORT = 6
"""Lines of a function that may leave its docstring out."""

Function: TypeAlias = ast.FunctionDef | ast.AsyncFunctionDef


def room_of(path: Path) -> str:
    room = room_imported(".".join(path.relative_to(PACKAGES).with_suffix("").parts))
    assert room is not None
    return room


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


@cache
def imports_of(path: Path) -> set[str]:
    """Dotted names `path` imports anywhere, also inside functions."""
    names: set[str] = set()
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            names.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            names.update(f"{node.module}.{alias.name}" for alias in node.names)
    return names


def room_imported(name: str) -> str | None:
    """Room of a dotted name; None where it is of another project."""
    package, *inner = name.split(".")
    if package != "inlay":
        return package if package in EXTENSIONS else None
    return "".join(inner[1:2] if inner[:1] in OF_ROOMS and inner[1:] else inner[:1])


FILES = sorted(
    path for path in PACKAGES.rglob("*.py") if path.parent != SOURCE or path.stem in MAY_IMPORT
)
assert len(FILES) > 300


def offending(judge: Callable[[Path], object]) -> dict[str, object]:
    """What is wrong, by file; files of which `judge` returns nothing are left out."""
    found = {str(path.relative_to(PACKAGES)): judge(path) for path in FILES}
    return {path: wrong for path, wrong in found.items() if wrong}


def test_a_room_imports_only_the_rooms_it_may_know() -> None:
    def judge(path: Path) -> object:
        room = room_of(path)
        inner = {found for name in imports_of(path) if (found := room_imported(name))}
        return inner - {room} - OF_ALL - MAY_IMPORT[room]

    assert offending(judge) == {}


def test_the_core_imports_no_extension() -> None:
    """What it is told of them are names, which it imports where they are loaded."""

    def judge(path: Path) -> object:
        named = {name for name in imports_of(path) if name.partition(".")[0] in EXTENSIONS}
        return path.is_relative_to(SOURCE) and named

    everything = {str(path.relative_to(PACKAGES)): judge(path) for path in SOURCE.rglob("*.py")}
    assert {path: named for path, named in everything.items() if named} == {}


def test_an_api_knows_no_other_and_what_they_share_knows_none() -> None:
    def judge(path: Path) -> object:
        if room_of(path) != "api" or path.name == "app.py":
            return None
        inside = path.relative_to(SOURCE / "api").parts[0]
        known = {name.split(".")[2] for name in imports_of(path) if name.startswith("inlay.api.")}
        return known & APIS - {inside}

    assert offending(judge) == {}


def test_schemas_import_no_server() -> None:
    paths = [path for path in FILES if path.parent.name == "schema" or path.stem == "schema"]
    assert len(paths) > 10
    for path in paths:
        inner = {name for name in imports_of(path) if name.startswith("inlay.")}
        assert all(name.rpartition(".")[0].startswith(tuple(SCHEMAS)) for name in inner), path


def test_heavy_libraries_stay_in_the_engines() -> None:
    def judge(path: Path) -> object:
        heavy = {name.split(".")[0] for name in imports_of(path)} & HEAVY
        inside = path.relative_to(PACKAGES).as_posix().startswith(HEAVY_MAY_BE_IN)
        return not inside and heavy

    assert offending(judge) == {}


def test_no_file_outgrows_a_reader() -> None:
    def judge(path: Path) -> object:
        lines = path.read_text(encoding="utf-8").splitlines()
        long = [line for line in lines if len(line) > MAX_COLUMNS]
        return long or (len(lines) > MAX_LINES and f"{len(lines)} lines")

    assert offending(judge) == {}


def test_no_wait_loses_that_it_was_cancelled() -> None:
    """Until Python 3.12 `asyncio.wait_for` drops a cancellation that comes with the result.

    `asyncio.timeout` does not.
    """
    assert offending(lambda path: "asyncio.wait_for(" in path.read_text(encoding="utf-8")) == {}


def test_a_command_of_a_test_ends_in_time() -> None:
    """One that hangs ends its test, not all of them."""
    runs = [f"subprocess.{name}" for name in ("run", "call", "check_call", "check_output")]
    endless = [
        f"{path}:{node.lineno}"
        for path in sorted(Path(__file__).parent.rglob("*.py"))
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func) in runs
        if "timeout" not in {keyword.arg for keyword in node.keywords}
    ]
    assert endless == []


QUESTIONS = {"What", "Whose", "Who", "Whom", "Whether", "How", "When", "Where", "Why"}


def test_a_docstring_opens_with_a_noun_or_an_imperative() -> None:
    def judge(path: Path) -> object:
        texts = [
            node.value.value
            for node in ast.walk(tree_of(path))
            if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant)
        ]
        return [text for text in texts if isinstance(text, str) and text.split()[0] in QUESTIONS]

    assert offending(judge) == {}


REPEATED = frozenset({
    "a", "an", "all", "and", "are", "as", "at", "be", "by", "each", "for", "from", "if",
    "in", "is", "it", "its", "none", "of", "on", "one", "or", "return", "returns", "that",
    "the", "their", "this", "to", "true", "false", "with", "which"
})  # fmt: skip
"""Words with which a docstring says nothing of its own."""


def _words(text: str) -> set[str]:
    """Words of a text or name, without the endings of plurals and verbs."""
    words = re.findall(r"[a-z]+", re.sub(r"([A-Z])", r" \1", text).lower())
    return {re.sub(r"(ing|ies|es|ed|s)$", "", word) or word for word in words}


def empty_docstrings(tree: ast.Module) -> list[Function]:
    """Functions whose docstring repeats the signature, or only names another function."""
    found = []
    for owner in ast.walk(tree):
        name = owner.name if isinstance(owner, ast.ClassDef) else ""
        for each in ast.iter_child_nodes(owner):
            if not isinstance(each, Function) or not (text := ast.get_docstring(each)):
                continue
            signature = " ".join((name, each.name, ast.unparse(each.args)))
            if each.returns is not None:
                signature += f" {ast.unparse(each.returns)}"
            said = {word for word in re.findall(r"[a-z]+", text.lower()) if word not in REPEATED}
            only_names = re.fullmatch(r"As `[^`]+`\.", text.strip())
            if only_names or _words(" ".join(said)) <= _words(signature):
                found.append(each)
    return found


def test_a_docstring_says_more_than_the_signature() -> None:
    assert offending(lambda path: [f.name for f in empty_docstrings(tree_of(path))]) == {}


def test_a_public_function_says_what_it_does() -> None:
    """One of up to six lines may leave it to its name, a method to its protocol."""
    said = {
        method.name
        for path in FILES
        for owner in ast.walk(tree_of(path))
        if isinstance(owner, ast.ClassDef)
        for method in owner.body
        if isinstance(method, Function) and ast.get_docstring(method)
    }

    def judge(path: Path) -> object:
        return [
            each.name
            for owner in ast.walk(tree_of(path))
            if isinstance(owner, ast.ClassDef | ast.Module)
            for each in owner.body
            if isinstance(each, Function)
            and not (each.name.startswith("_") or getattr(owner, "name", "_").startswith("_"))
            and not ast.get_docstring(each)
            and (each.end_lineno or 0) - each.body[0].lineno >= SHORT
            and not (isinstance(owner, ast.ClassDef) and each.name in said)
        ]

    assert offending(judge) == {}


def test_a_module_does_not_list_its_public_names() -> None:
    """A name without an underscore is public; a package lists what it exports of its modules."""

    def judge(path: Path) -> object:
        return path.name != "__init__.py" and "\n__all__ =" in path.read_text(encoding="utf-8")

    assert offending(judge) == {}


def test_every_room_is_known() -> None:
    rooms = {room_of(path) for path in FILES}
    assert rooms <= set(MAY_IMPORT)
    assert {path.name for path in PACKAGES.iterdir() if path.is_dir()} == {"inlay", *EXTENSIONS}


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


def test_one_function_says_that_a_context_is_too_long() -> None:
    raising = {
        path.relative_to(SOURCE).as_posix()
        for path in FILES
        if "ContextLengthError(" in path.read_text(encoding="utf-8")
    }
    assert raising == {"base/errors.py", "messages/fields.py"}
