"""Settings all tests share."""

import gc
import logging
import os
from collections.abc import Iterator

import httpx
import pytest
from hypothesis import HealthCheck, settings

from tests import preloaded
from tests.examples import FULL, QUICK

# Modules and tests are no garbage: no collection looks at them, now or while tests run.
gc.disable()

for name, number in {"inlay": FULL, "quick": QUICK}.items():
    settings.register_profile(
        name,
        derandomize=True,
        max_examples=number,
        deadline=None,
        suppress_health_check=[HealthCheck.too_slow],
    )
settings.load_profile("inlay")

# As `make test` sets it: processes are forked where what they read at their start is as here.
os.environ.setdefault("OMP_NUM_THREADS", "1")
preloaded.install()

# httpx gives up after five seconds unless it is told otherwise; a busy machine is no fault of what
# is tested.
for part in ("connect", "read", "write", "pool"):
    setattr(httpx._config.DEFAULT_TIMEOUT_CONFIG, part, 180.0)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def started_processes() -> Iterator[None]:
    """For tests of the start itself: processes of inlay are started, not forked."""
    with preloaded.started():
        yield


@pytest.fixture(autouse=True)
def _logging_of_its_own() -> Iterator[None]:
    """Remove handlers that a test's commands made: their stream is closed with the test."""
    yield
    for handler in tuple(logging.root.handlers):
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)
