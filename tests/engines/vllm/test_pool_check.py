"""vLLM is held to the logprobs of the model's own code."""

from pathlib import Path

import pytest

from inlay.engine.api import GenerateEngine
from inlay.engine.settings import EngineSettings
from tests.engines.held import it_is_held_to_what_is_kept, nothing_kept_is_said, own_cache
from tests.engines.starting import started
from tests.engines.vllm.serving import FLAGS, model


@pytest.mark.asyncio(loop_scope="session")
async def test_it_is_held_to_what_is_kept(
    shared: GenerateEngine, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with own_cache(tmp_path):
        await nothing_kept_is_said(shared, caplog)
        await it_is_held_to_what_is_kept(shared, directory, caplog)


async def test_and_so_in_bfloat16(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = model("qwen3", "bfloat16")
    with own_cache(tmp_path):
        async with started(EngineSettings.of(model=str(path), **FLAGS)) as engine:
            assert engine.card.dtype == "bfloat16"
            await it_is_held_to_what_is_kept(engine, path, caplog)
