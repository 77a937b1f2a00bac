"""One vLLM-Omni for all tests that do not end it: it takes a quarter of a minute to start."""

import warnings
from collections.abc import AsyncIterator
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import pytest
import pytest_asyncio
import torch

from inlay.engine.api import Engine
from tests.engines.starting import mark, running
from tests.engines.vllm_omni.serving import settings

_IS_HERE = find_spec("vllm_omni") is not None
# Its tests import it: in another environment there is nothing to collect.
collect_ignore_glob = [] if _IS_HERE else ["test_*.py"]


def pytest_configure() -> None:
    if not _IS_HERE:
        return
    torch.set_num_threads(1)
    # What it warns of while it is imported is not of the tests.
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        import_module("inlay_stages.engines.vllm_omni.engine")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    mark(items, Path(__file__).parent)


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def engine() -> AsyncIterator[Engine]:
    # A strict start is none that is refused: nothing compares its images, and its card says so.
    async with running(settings("qwen", self_check="strict")) as engine:
        yield engine
