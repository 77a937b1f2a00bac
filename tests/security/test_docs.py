"""docs/security.md names tests that exist."""

import re
from pathlib import Path

HERE = Path(__file__).parent
PAGE = HERE.parent.parent / "docs" / "security.md"
_names = re.compile(r"`(test_\w+\.py)?::(test_\w+)`")


def test_every_test_the_page_names_is_there_and_every_attack_is_on_the_page() -> None:
    named: set[tuple[str, str]] = set()
    file = ""
    for match in _names.finditer(PAGE.read_text(encoding="utf-8")):
        file = match[1] or file
        named.add((file, match[2]))
    found = {
        (path.name, name)
        for path in HERE.glob("test_*.py")
        for name in re.findall(r"^def (test_\w+)", path.read_text(encoding="utf-8"), re.MULTILINE)
        if path.name != Path(__file__).name
    }
    assert named == found
