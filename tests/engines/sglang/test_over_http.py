"""`inlay serve --engine sglang`, SGLang in its own environment, asked by the `openai` client.

The expected tokens come from plain transformers in float32 and must be identical: text, ids, rows
and mixtures, alone and together.
"""

import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from tests import preloaded
from tests.engines.sglang.serving import FLAGS
from tests.equality.test_over_http import every_form_decodes_to_the_reference
from tests.serving import Served, serving

START_SECONDS = 280.0


@contextmanager
def serve(directory: Path, *more: object) -> Iterator[Served]:
    """`inlay serve` of the model in `directory`."""
    words = ("--engine", "sglang", "--engine-python", sys.executable, "--served-model-name", "m")
    options = (
        "--enable-prompt-embeds",
        "--device",
        "cpu",
        "--num-threads",
        1,
        "--max-num-seqs",
        16,
    )
    # `serving` puts the port last, and the words after -- have to stand behind it.
    environment = {
        "HF_HUB_OFFLINE": "1",
        "INLAY_ENGINE_ARGUMENTS": " ".join(FLAGS["engine_arguments"]),
    }
    with serving(
        directory, *words, *options, *more, environment=environment, within=START_SECONDS
    ) as served:
        yield served


@pytest.fixture(scope="module")
def server(directory: Path) -> Iterator[Served]:
    # All of it started, none forked, as users have it.
    with preloaded.started(), serve(directory) as served:
        yield served


@pytest.fixture
async def client(server: Served) -> AsyncIterator[openai.AsyncOpenAI]:
    async with openai.AsyncOpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        yield client


async def test_every_form_of_a_prompt_decodes_to_the_reference_alone_and_in_company(
    client: openai.AsyncOpenAI, directory: Path
) -> None:
    await every_form_decodes_to_the_reference(client, directory)


def test_what_sglang_does_otherwise_is_a_400_that_says_why(server: Served) -> None:
    entry = httpx.get(server.v1 + "/models/m").json()
    cases: list[tuple[str, dict[str, Any]]] = [
        ("the output alone", {"repetition_penalty": 1.5}),
        ("does not depend on one", {"seed": 5, "temperature": 1.0}),
        ("has no structured output", {"structured_outputs": {"regex": "a+"}}),
        ("out of vocabulary", {"prompt": [5, entry["vocab_size"]]}),
    ]
    for said, fields in cases:
        body = {"model": "m", "prompt": "Hello", "max_tokens": 4, **fields}
        answer = httpx.post(server.v1 + "/completions", json=body)
        assert answer.status_code == 400, answer.text
        assert said in answer.json()["error"]["message"]
    assert entry["engine"].startswith("sglang 0.5")
