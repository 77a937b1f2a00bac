"""Size and shape of the source: lines, names, imports, circles."""

import ast
import io
import tokenize
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

SMALL, LONG, MANY = 40, 50, 7
"""Lines of a small file; lines of a long function; parameters above which they are many."""


class Lines(NamedTuple):
    """Lines of a package: all, of docstrings and comments, blank."""

    all: int
    said: int
    blank: int


class Module(NamedTuple):
    """A parsed file."""

    name: str
    path: Path
    text: str
    tree: ast.Module


def modules(source: Path) -> list[Module]:
    """Parse all files below `source`."""
    found = []
    for path in sorted(source.rglob("*.py")):
        parts = path.relative_to(source).with_suffix("").parts
        name = ".".join(parts[:-1] if parts[-1] == "__init__" else parts)
        text = path.read_text(encoding="utf-8")
        found.append(Module(name, path, text, ast.parse(text)))
    return found


def lines(module: Module) -> Lines:
    """Count lines of one module."""
    total = module.text.splitlines()
    said = {
        number
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
        for number in range(node.lineno, (node.end_lineno or 0) + 1)
    }
    for token in tokenize.generate_tokens(io.StringIO(module.text).readline):
        if token.type == tokenize.COMMENT and total[token.start[0] - 1].lstrip().startswith("#"):
            said.add(token.start[0])
    blank = sum(not line.strip() and number not in said for number, line in enumerate(total, 1))
    return Lines(len(total), len(said), blank)


def summed(found: list[Module]) -> Lines:
    """Count lines of several."""
    return Lines(*map(sum, zip(*map(lines, found), strict=True))) if found else Lines(0, 0, 0)


def functions(module: Module) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
    """Yield all functions of a module."""
    for node in ast.walk(module.tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            yield node


def shapes(found: list[Module]) -> dict[str, int]:
    """Count what makes a house hard to know."""
    classes = Counter(
        node.name
        for module in found
        for node in ast.walk(module.tree)
        if isinstance(node, ast.ClassDef)
    )
    all_functions = [each for module in found for each in functions(module)]
    return {
        f"files of {SMALL} lines or fewer": sum(
            len(module.text.splitlines()) <= SMALL for module in found
        ),
        "class names used twice or more": sum(count > 1 for count in classes.values()),
        f"functions over {LONG} lines": sum(
            (each.end_lineno or 0) - each.lineno >= LONG for each in all_functions
        ),
        f"functions of over {MANY} parameters": sum(
            len(each.args.args) + len(each.args.kwonlyargs) + len(each.args.posonlyargs) > MANY
            for each in all_functions
        ),
        "uses of Any": sum(
            isinstance(node, ast.Name) and node.id == "Any"
            for module in found
            for node in ast.walk(module.tree)
        ),
    }


def imports(module: Module, names: set[str]) -> set[str]:
    """Return the modules of `names` that one imports, but for types alone."""
    found: set[str] = set()
    body: list[ast.AST] = list(module.tree.body)
    package = module.name if module.path.name == "__init__.py" else module.name.rpartition(".")[0]
    while body:
        node = body.pop()
        if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.dump(node.test):
            continue
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names} & names
        elif isinstance(node, ast.ImportFrom):
            start = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                start = ".".join([*above, *([start] if start else [])])
            below = {f"{start}.{alias.name}" for alias in node.names} & names
            found |= below or ({start} & names)
        body += ast.iter_child_nodes(node)
    return found - {module.name}


def circles(found: list[Module]) -> list[list[str]]:
    """Return the groups of modules that import each other (Tarjan, 1972)."""
    names = {module.name for module in found}
    arrows = {module.name: sorted(imports(module, names)) for module in found}
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[list[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in arrows[name]:
            if other not in index:
                visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            place = stack.index(name)
            group, stack[place:] = stack[place:], []
            if len(group) > 1:
                groups.append(sorted(group))

    for name in sorted(arrows):
        if name not in index:
            visit(name)
    return groups


def words(folders: list[Path]) -> int:
    """Count the words of Markdown pages, the change log apart."""
    paths = [
        path
        for folder in folders
        for path in ([folder] if folder.is_file() else folder.rglob("*.md"))
    ]
    return sum(
        len(path.read_text(encoding="utf-8").split())
        for path in paths
        if path.name != "CHANGELOG.md"
    )
