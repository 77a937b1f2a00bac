"""Prompt embeddings through LangChain's chat model, as docs/client.md shows."""

from collections.abc import Iterator

import pytest

from tests.engines.snippets import run_snippet
from tests.serving import Served, serving

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(command="demo") as served:
        yield served


def test_the_snippet_for_langchain_answers_from_the_rows(
    server: Served, capsys: pytest.CaptureFixture[str]
) -> None:
    from inlay import demo
    from inlay.client import PromptEmbedder

    mixed = demo.examples().mixed[0]
    embedder = PromptEmbedder.from_pretrained(demo.model_dir())
    run_snippet("LangChain", server.url, {"embedder": embedder, "mixed": mixed})
    said = capsys.readouterr().out.split("\n")
    assert said[:2] == [mixed.answer, mixed.answer]
