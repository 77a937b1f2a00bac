"""Places in the batch of SGLang are shared among clients."""

from pathlib import Path

import pytest

from inlay.engine.api import GenerateEngine
from inlay.messages.priority import BACKGROUND
from tests.engine.flood import a_newcomer_is_served_at_once

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def test_a_newcomer_is_served_at_once_beside_a_client_that_asked_for_everything(
    shared: GenerateEngine, directory: Path
) -> None:
    await a_newcomer_is_served_at_once(shared, directory)


async def test_a_request_is_served_at_once_beside_batches_of_its_own_client(
    shared: GenerateEngine, directory: Path
) -> None:
    await a_newcomer_is_served_at_once(shared, directory, "greedy", BACKGROUND)
