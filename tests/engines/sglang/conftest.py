"""One SGLang for all tests that do not end it: it takes half a minute to start."""

import os
import sys
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
import pytest_asyncio

from inlay import engine as engines
from inlay.engine.api import GenerateEngine
from inlay.engine.settings import EngineSettings
from tests.engines.sglang.serving import FLAGS
from tests.engines.starting import mark, preload, started
from tests.models import tiny

_STATUS = pytest.StashKey[int]()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items, Path(__file__).parent)


def pytest_sessionfinish(session: pytest.Session, exitstatus: int) -> None:
    session.config.stash[_STATUS] = int(exitstatus)


@pytest.hookimpl(tryfirst=True)
def pytest_unconfigure(config: pytest.Config) -> None:
    # What this environment loads leaves loops and sockets open, which pytest would find now, and
    # ends some interpreters with a segmentation fault; all is reported by now.
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(config.stash.get(_STATUS, 1))


@pytest.fixture(scope="session", autouse=True)
def _imported_for_a_cpu() -> None:
    """Import SGLang as a worker on a CPU does: what it imports otherwise, it keeps."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in engines.environment(EngineSettings.of(model="", **FLAGS), {}).items():
            patch.setenv(name, value)
        from sglang.srt.managers.multimodal_processor import import_processors

        import_processors("sglang.srt.multimodal.processors")


@pytest.fixture(scope="session", autouse=True)
def _preloaded(_imported_for_a_cpu: None) -> None:
    preload(
        FLAGS,
        [
            "inlay.worker.child",
            "inlay.engine.sglang.engine",
            "sglang.srt.entrypoints.engine",
            "sglang.srt.managers.detokenizer_manager",
            "sglang.srt.managers.scheduler",
        ],
    )


@pytest.fixture(scope="session")
def directory() -> Path:
    return tiny("qwen3")


@pytest.fixture(scope="session")
def settings(directory: Path) -> EngineSettings:
    return EngineSettings.of(model=str(directory), **FLAGS)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared(settings: EngineSettings) -> AsyncIterator[GenerateEngine]:
    async with started(settings) as engine:
        yield engine
