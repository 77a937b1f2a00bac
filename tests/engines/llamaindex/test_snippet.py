"""Prompt embeddings through LlamaIndex, as docs/client.md shows."""

import pytest

from inlay import demo
from inlay.client import PromptEmbedder
from tests.engines.snippets import run_snippet
from tests.serving import serving

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]


def test_the_snippet_for_llamaindex_answers_from_the_rows(
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = {"embedder": PromptEmbedder.from_pretrained(demo.model_dir()), "demo": demo}
    with serving(command="demo") as server:
        run_snippet("LlamaIndex", server.url, names)
    assert capsys.readouterr().out.strip() == demo.examples().completions[0].answer.strip()
