"""Snippets of docs/client.md that need libraries of their own, run as they stand there."""

import re
from pathlib import Path

PAGE = Path(__file__).resolve().parents[2] / "docs" / "client.md"


def run_snippet(heading: str, url: str, names: dict[str, object]) -> None:
    """Run the indented code below a heading against a server.

    Args:
        heading: of the section.
        url: of the server, in place of the one that the page names.
        names: that the code finds.
    """
    page = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(rf"^## {heading}\n(.*?)^## ", page, re.M | re.S)
    code = "\n".join(line[4:] for line in section.splitlines() if line[:4] in ("", "    "))
    exec(compile(code.replace("http://127.0.0.1:8000", url), str(PAGE), "exec"), names)
