"""The real all-MiniLM-L6-v2 over NATS.

A server, three workers and a frontend, each a process, asked by the real clients.

No text is kept, so every client's vectors are computed anew, by whichever worker has least to do.
"""

import random
import re
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from typing import Any

import httpx
import openai
import pytest

from tests.embedding_models import WORDS
from tests.engines.embeddings.test_agreement import agree, minilm
from tests.parts import Part, running
from tests.serving import Served, free_port, serving

pytestmark = [pytest.mark.engines, pytest.mark.filterwarnings("default")]

WORKERS = 3
_generator = random.Random(11)
TEXTS = sorted(
    {
        " ".join(
            _generator.choices(WORDS, k=max(2, min(120, int(_generator.lognormvariate(3.0, 0.9)))))
        )
        for _ in range(450)
    }
)
"""Of several chunks, and no two alike: those would be computed once."""

Embed = Callable[[Served], Any]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    port = free_port()
    nats = f"nats://127.0.0.1:{port}"
    words: tuple[object, ...] = (
        *(minilm(), "--task", "embed", "--dtype", "float32", "--num-threads", 1, "--nats", nats),
        # Probes would count among what the workers have done.
        *("--served-model-name", "minilm", "--health-probe-interval", 0),
    )
    with ExitStack() as stack:
        store = tmp_path_factory.mktemp("nats")
        stack.enter_context(
            running("nats", "--port", port, "--store-dir", store, until="NATS at nats://")
        )
        workers = [Part("worker", *words, until=" serves ") for _ in range(WORKERS)]
        for worker in workers:
            stack.callback(worker.end)
        for worker in workers:
            worker.wait_ready()
        yield stack.enter_context(serving("--nats", nats, command="frontend"))


@pytest.fixture(scope="module")
def expected() -> Any:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(str(minilm()), device="cpu").encode(TEXTS)


def positions(server: Served) -> dict[str, float]:
    """Positions each worker has embedded so far."""
    text = httpx.get(server.url + "/metrics", timeout=60).text
    found = re.findall(
        r'^inlay:engine_positions_total\{engine="([^"]+)".*\} (\S+)$', text, re.MULTILINE
    )
    return {engine: float(value) for engine, value in found}


def by_openai(server: Served) -> Any:
    with openai.OpenAI(base_url=server.v1, api_key="none", timeout=300) as client:
        answer = client.embeddings.create(model="minilm", input=TEXTS)
    assert [item.index for item in answer.data] == list(range(len(TEXTS)))
    return [item.embedding for item in answer.data]


def by_openai_as_floats(server: Served) -> Any:
    with openai.OpenAI(base_url=server.v1, api_key="none", timeout=300) as client:
        answer = client.embeddings.create(model="minilm", input=TEXTS, encoding_format="float")
    return [item.embedding for item in answer.data]


def by_langchain(server: Served) -> Any:
    from langchain_openai import OpenAIEmbeddings

    embeddings = OpenAIEmbeddings(
        base_url=server.v1,
        api_key="none",
        model="minilm",
        check_embedding_ctx_length=False,
        chunk_size=200,
    )
    return embeddings.embed_documents(TEXTS)


@pytest.mark.parametrize("embed", [by_openai, by_openai_as_floats, by_langchain])
def test_a_client_that_all_workers_answer_agrees_with_sentence_transformers(
    server: Served, expected: Any, embed: Embed
) -> None:
    before = positions(server)
    assert len(before) == WORKERS
    agree(embed(server), expected)
    after = positions(server)
    assert after.keys() == before.keys()
    done = [after[engine] - before[engine] for engine in after]
    # Of 8,192 positions each, the texts are two pieces.
    assert sum(part > 0 for part in done) > 1
    answer = httpx.post(
        server.v1 + "/embeddings", json={"model": "minilm", "input": TEXTS}, timeout=300
    )
    assert sum(done) == answer.json()["usage"]["total_tokens"]
