"""The snippets of docs/client.md run in order, as one program, against `inlay demo`."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import serving

PAGE = Path(__file__).parents[2] / "docs" / "client.md"
SHOWN_URL = "http://127.0.0.1:8000"
"""The address the page shows, which stands for the server's real one."""


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with serving(command="demo") as served:
        yield served.url


def test_every_snippet_of_the_client_page_runs(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    page = PAGE.read_text(encoding="utf-8")
    snippets = re.findall(r"^```python\n(.*?)^```", page, re.M | re.S)
    assert len(snippets) >= 8
    assert SHOWN_URL in snippets[0]
    names: dict[str, object] = {}
    for snippet in snippets:
        code = compile(snippet.replace(SHOWN_URL, url), str(PAGE), "exec")
        exec(code, names)
    assert capsys.readouterr().out.strip()
