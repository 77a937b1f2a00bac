"""SGLang is held to the logprobs of the model's own code."""

from pathlib import Path

import pytest

from inlay.engine.api import GenerateEngine
from tests.engines.held import it_is_held_to_what_is_kept, nothing_kept_is_said, own_cache


@pytest.mark.asyncio(loop_scope="session")
async def test_it_is_held_to_what_is_kept(
    shared: GenerateEngine, directory: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with own_cache(tmp_path):
        await nothing_kept_is_said(shared, caplog)
        await it_is_held_to_what_is_kept(shared, directory, caplog)
