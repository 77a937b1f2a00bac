"""Prompt embeddings through LangChain's chat model, as docs/client.md shows."""

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import Served, serving

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

PAGE = Path(__file__).resolve().parents[3] / "docs" / "client.md"


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(command="demo") as served:
        yield served


def test_the_snippet_for_langchain_answers_from_the_rows(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    from inlay import demo
    from inlay.client import PromptEmbedder

    page = PAGE.read_text(encoding="utf-8")
    (section,) = re.findall(r"^## LangChain\n(.*?)^## ", page, re.M | re.S)
    code = "\n".join(line[4:] for line in section.splitlines() if line[:4] in ("", "    "))
    mixed = demo.examples().mixed[0]
    names: dict[str, object] = {
        "embedder": PromptEmbedder.from_pretrained(demo.model_dir()),
        "mixed": mixed,
    }
    code = code.replace("http://127.0.0.1:8000", server.url)
    exec(compile(code, str(PAGE), "exec"), names)
    said = capsys.readouterr().out.split("\n")
    assert said[:2] == [mixed.answer, mixed.answer]
