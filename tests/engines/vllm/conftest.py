"""One vLLM for all tests that do not end it: it takes half a minute to start."""

import warnings
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from inlay.engine.api import GenerateEngine
from inlay.engine.settings import EngineSettings
from tests.engines.starting import mark, preload, started
from tests.engines.vllm.serving import FLAGS, model


def pytest_configure() -> None:
    # Of vLLM's client, found when the last test has ended: neither a mark of a test nor the
    # configuration reaches there. Its sockets too, where the loop that was to close them has ended.
    left = "Unclosed (context|socket)|Destroying context with unclosed socket"
    warnings.filterwarnings("ignore", left, ResourceWarning)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items, Path(__file__).parent)


@pytest.fixture(scope="session", autouse=True)
def _preloaded() -> None:
    preload(
        FLAGS,
        [
            "inlay.worker.host",
            "inlay.engine.vllm.engine",
            "inlay.engine.vllm.pooling",
            "vllm.entrypoints.launchers.api_server.entry",
            "vllm.v1.engine.core",
            "vllm.v1.executor.multiproc_executor",
            "vllm.v1.worker.cpu_worker",
        ],
    )


@pytest.fixture(scope="session")
def directory() -> Path:
    return model("llama")


@pytest.fixture(scope="session")
def settings(directory: Path) -> EngineSettings:
    return EngineSettings.of(model=str(directory), **FLAGS)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(settings: EngineSettings) -> AsyncIterator[GenerateEngine]:
    async with started(settings) as engine:
        yield engine
