"""`inlay serve --engine vllm --task embed` with vLLM in an environment of its own."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.embedding_models import sized_embedding
from tests.engines.embed_over_http import EmbedOverHttp
from tests.serving import Served, serving

START_SECONDS = 280.0
SIZES = {"hidden_size": 96, "num_attention_heads": 3, "is_matryoshka": True}
"""vLLM's attention on a CPU takes heads of 32 elements."""


@contextmanager
def served(directory: Path) -> Iterator[Served]:
    words = ("--engine", "vllm", "--engine-python", sys.executable, "--served-model-name", "m")
    sizes = (
        "--block-size",
        32,
        "--kv-cache-memory-bytes",
        8 << 20,
        "--max-num-batched-tokens",
        256,
    )
    options = (
        "--task",
        "embed",
        "--enable-prompt-embeds",
        "--num-threads",
        1,
        "--max-num-seqs",
        16,
    )
    # `serving` puts the port last, and the words after -- have to stand behind it.
    environment = {"HF_HUB_OFFLINE": "1", "INLAY_ENGINE_ARGUMENTS": "--enforce-eager"}
    with serving(
        directory, *words, *sizes, *options, environment=environment, within=START_SECONDS
    ) as server:
        yield server


class _Served(EmbedOverHttp):
    @pytest.fixture(scope="class")
    def server(self, directory: Path) -> Iterator[Served]:
        with served(directory) as server:
            yield server


class TestDecoder(_Served):
    rows_refused = None

    @pytest.fixture(scope="class")
    def directory(self) -> Path:
        return sized_embedding("qwen3", **SIZES, num_key_value_heads=1, head_dim=32)


class TestEncoder(_Served):
    rows_refused = "rows are taken by models whose"

    @pytest.fixture(scope="class")
    def directory(self) -> Path:
        return sized_embedding("bert", **SIZES)
