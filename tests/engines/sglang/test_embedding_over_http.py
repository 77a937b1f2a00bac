"""`inlay serve --engine sglang --task embed` with SGLang in an environment of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from tests.embedding_models import tiny_embedding
from tests.engines.embed_over_http import EmbedOverHttp
from tests.engines.sglang.serving import FLAGS
from tests.serving import Served, serving

START_SECONDS = 280.0


@contextmanager
def served(directory: Path, *more: object) -> Iterator[Served]:
    words = ("--engine", "sglang", "--engine-python", sys.executable, "--served-model-name", "m")
    options = (
        "--task",
        "embed",
        "--device",
        "cpu",
        "--num-threads",
        1,
        "--max-num-seqs",
        16,
        *more,
    )
    # `serving` puts the port last, and the words after -- have to stand behind it.
    environment = {
        "HF_HUB_OFFLINE": "1",
        "INLAY_ENGINE_ARGUMENTS": " ".join(FLAGS["engine_arguments"]),
    }
    with serving(
        directory, *words, *options, environment=environment, within=START_SECONDS
    ) as server:
        yield server


class TestDecoder(EmbedOverHttp):
    rows_refused = None

    @pytest.fixture(scope="class")
    def directory(self) -> Path:
        return tiny_embedding("qwen3", is_matryoshka=True)

    @pytest.fixture(scope="class")
    def server(self, directory: Path) -> Iterator[Served]:
        with served(directory, "--enable-prompt-embeds", "--max-num-batched-tokens", 256) as server:
            yield server

    def test_vectors_of_another_length_than_one_are_refused(self, server: Served) -> None:
        body = {"model": "m", "input": "hello", "normalize": False}
        answer = httpx.post(server.v1 + "/embeddings", json=body)
        assert answer.status_code == 400, answer.text
        assert "normalize may only be true" in answer.json()["error"]["message"]


class TestEncoder(EmbedOverHttp):
    rows_refused = "rows are taken by models whose"

    @pytest.fixture(scope="class")
    def directory(self) -> Path:
        return tiny_embedding("bge", is_matryoshka=True)

    @pytest.fixture(scope="class")
    def server(self, directory: Path) -> Iterator[Served]:
        with served(directory, "--enable-prompt-embeds", "--max-num-batched-tokens", 256) as server:
            yield server
