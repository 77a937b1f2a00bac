"""DeepSeek-R1 on vLLM for CPU behind `inlay serve`, and the commands of `docs/deepseek.md`.

The weights are dequantised before: vLLM's fp8 products need a GPU. Its attention on a CPU takes
R1's own latent of 512 + 64 elements, in float32 if it is told not to use the CPU's matrix tiles,
without prefix caching and in one chunk.
"""

import json
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from inlay.engine.settings import EngineSettings
from tests.deepseek import plain_r1, published, recipes
from tests.engines.vllm.test_over_http import serve
from tests.equality.r1 import R1Conformance
from tests.equality.reference import rows_of
from tests.equality.test_over_http import saved
from tests.serving import Served

DRAFTS = {"method": "mtp", "num_speculative_tokens": 1, "attention_backend": "CPU_MLA"}


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    words = ("--attention-backend", "CPU_MLA", "--max-model-len", 512)
    with serve(
        plain_r1(), *words, "--speculative-config", json.dumps(DRAFTS, separators=(",", ":"))
    ) as served:
        yield served


class TestR1OnVllm(R1Conformance):
    """The built-in engine's tests, while vLLM drafts with a layer that knows of no rows."""

    def test_a_penalty_that_would_count_what_stands_for_rows_is_refused(
        self, server: Served
    ) -> None:
        rows = saved(rows_of(plain_r1(), [5, 6, 7, 8, 9]))
        asked = {"model": "m", "prompt_embeds": rows, "repetition_penalty": 1.2, "max_tokens": 2}
        answer = httpx.post(server.v1 + "/completions", json=asked)
        assert answer.status_code == 400
        assert (
            "where it speculates, token 0 stands in the place of every row"
            in answer.json()["error"]["message"]
        )


@pytest.mark.parametrize(
    "words", recipes(), ids=lambda words: " ".join(words[words.index("--") + 1 :])
)
def test_vllm_takes_the_words_of_every_command_that_is_shown(
    words: list[str], tmp_path: Path
) -> None:
    from inlay.engine.vllm.arguments import engine_args

    (tmp_path / "config.json").write_text(json.dumps(published()))
    end = words.index("--")
    length = int(words[words.index("--max-model-len") + 1]) if "--max-model-len" in words else None
    given = [*words[end + 1 :], "--enable-prompt-embeds"]
    found = engine_args(
        EngineSettings.of(
            model=str(tmp_path), engine="vllm", engine_arguments=given, max_model_len=length
        ),
        tmp_path,
    )
    parallel = (found.tensor_parallel_size, found.pipeline_parallel_size, found.data_parallel_size)
    assert parallel in ((8, 1, 1), (1, 1, 8), (8, 2, 1))
    assert found.enable_expert_parallel
    # What is stored says how it is quantised.
    assert (found.quantization, found.dtype) == (None, "auto")
    if "--speculative-config" in words:
        assert found.speculative_config == {"method": "mtp", "num_speculative_tokens": 1}
