"""docs/attacks.md names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "attacks.md"
_names = re.compile(r"`(?:((?:\w+/)*)(test_\w+\.py))?::(test_\w+)`")


def names_in(path: Path) -> set[str]:
    return set(
        re.findall(r"^(?:async )?def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
    )


def test_every_test_the_page_names_is_there_and_every_attack_is_on_the_page() -> None:
    named: dict[Path, set[str]] = {}
    file = HERE
    for folder, name, test in _names.findall(PAGE.read_text(encoding="utf-8")):
        if name:
            file = (HERE.parent / folder.removeprefix("tests/") if folder else HERE) / name
        named.setdefault(file, set()).add(test)
    missing = {path.name: tests - names_in(path) for path, tests in named.items()}
    assert not any(missing.values()), missing
    attacks = {
        path: names_in(path) for path in HERE.glob("test_*.py") if path.name != Path(__file__).name
    }
    assert {path: named.get(path) for path in attacks} == attacks
