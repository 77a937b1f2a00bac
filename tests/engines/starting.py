"""Engines of others, started in the process of the tests with a worker's environment."""

import os
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from inlay import engine as engines
from inlay.engine.api import GenerateEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.digest import Secret
from tests import preloaded

SECRET = Secret(bytes(range(32)))


def preload(flags: Mapping[str, Any], modules: Sequence[str]) -> None:
    """Fork the processes of an engine, and workers of servers, where `modules` are imported.

    Each starts two or three that import its library, which takes 10 s of CPU time.

    Args:
        flags: settings that say which variables there are when it is imported.
        modules: to import.
    """
    os.environ |= {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    variables = engines.environment(EngineSettings.of(model="", **flags), {})
    preloaded.install(
        modules, {"HF_HUB_OFFLINE": "1", **variables}, os.environ.get("FRONTEND_PYTHON")
    )


@asynccontextmanager
async def running(settings: EngineSettings) -> AsyncIterator[Any]:
    """A started engine, in this process, with the environment a worker would have."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "HF_HUB_OFFLINE": "1",
            **engines.environment(settings, os.environ),
        }.items():
            patch.setenv(name, value)
        engine = engines.create(settings, SECRET)
        await engine.start()
        try:
            yield engine
        finally:
            await engine.close()


@asynccontextmanager
async def started(settings: EngineSettings) -> AsyncIterator[GenerateEngine]:
    """A running engine that generates."""
    async with running(settings) as engine:
        assert isinstance(engine, GenerateEngine)
        yield engine


def mark(items: list[pytest.Item], folder: Path) -> None:
    """Mark the tests of `folder` as those of another's engine: slow to start, full of warnings."""
    for item in items:
        if folder in item.path.parents:
            item.add_marker(pytest.mark.engines)
            item.add_marker(pytest.mark.timeout(900))
            item.add_marker(pytest.mark.filterwarnings("ignore"))
