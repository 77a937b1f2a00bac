"""Settings all tests share."""

import faulthandler
import gc
import logging
import os
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from zlib import crc32

import httpx
import pytest
from hypothesis import HealthCheck, settings
from scripts.test_again import ENDED

from inlay.extension import BUNDLED, extensions
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


TESTS = Path(__file__).parent

STUCK = 60
"""Seconds after its timeout when a test that does not end is ended with its process."""
_stderr = pytest.StashKey[int]()


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what needs an extension that is not loaded: by its mark, or the folder of its tests."""
    needed = {item.path.relative_to(TESTS).parts[0]} & {*BUNDLED}
    for mark in item.iter_markers("extensions"):
        needed |= {*mark.args} or {*BUNDLED}
    if missing := needed - {extension.name for extension in extensions()}:
        pytest.skip(f"without the extensions {', '.join(sorted(missing))}")


def pytest_configure(config: pytest.Config) -> None:
    config.stash[_stderr] = os.dup(2)  # nothing is captured yet
    if not hasattr(config, "workerinput") and config.pluginmanager.has_plugin("cacheprovider"):
        assert config.cache is not None
        config.cache.set(ENDED, 0)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item: pytest.Item) -> Iterator[None]:
    """Show what each thread does where a timeout ends nothing, and end the process.

    The timeout is an exception, which code may catch, or which ends a test whose fixtures then
    wait without one. pytest-xdist goes on with another process.
    """
    _watch(item)
    try:
        return (yield)
    finally:
        faulthandler.cancel_dump_traceback_later()


@pytest.hookimpl(trylast=True)
def pytest_exception_interact(node: pytest.Item | pytest.Collector) -> None:
    if isinstance(node, pytest.Item):  # pytest's own hook has ended the watch
        _watch(node)


def _watch(item: pytest.Item) -> None:
    marker = item.get_closest_marker("timeout")
    seconds = float(marker.args[0] if marker else item.config.getini("timeout"))
    told = item.config.stash[_stderr]
    faulthandler.dump_traceback_later(seconds + STUCK, file=told, exit=True)


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any, error: object) -> None:
    if error:
        cache = node.config.cache
        cache.set(ENDED, cache.get(ENDED, 0) + 1)


SHARE = 8
"""Of the cases of a test, one in so many is not `thorough`."""
ROOMS = tuple(
    f"tests/{room}/"
    for room in (
        "api", "audit", "batches", "cli", "engine", "equality", "http", "media", "render",
        "router", "security", "state", "store", "transport", "worker",
    )
)  # fmt: skip
"""Whose cases add up to minutes."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark most cases of a test `thorough`: which, says its file.

    Tests of one or two cases stay as they are, as do cases that are marked already.
    """
    tests: dict[str, list[pytest.Item]] = defaultdict(list)
    for item in items:
        marked = any(map(item.get_closest_marker, ("slow", "thorough")))
        if item.nodeid.startswith(ROOMS) and not marked:
            tests[item.nodeid.partition("[")[0]].append(item)
    for name, cases in tests.items():
        if len(cases) > 2:
            kept = crc32(name.partition("::")[0].encode()) % min(len(cases), SHARE)
            for number, item in enumerate(cases):
                if number % SHARE != kept:
                    item.add_marker(pytest.mark.thorough)


def pytest_collection_finish() -> None:
    gc.freeze()
    gc.enable()


@pytest.fixture
def started_processes() -> Iterator[None]:
    """For tests of the start itself: processes of inlay are started, not forked."""
    with preloaded.started():
        yield


@pytest.fixture(autouse=True)
def _no_real_time() -> Iterator[None]:
    """Fail a test that leaves this thread, and all it starts, more of the CPU than others have."""
    yield
    if hasattr(os, "sched_getscheduler"):
        assert os.sched_getscheduler(0) == os.SCHED_OTHER


@pytest.fixture(autouse=True)
def _logging_of_its_own() -> Iterator[None]:
    """Remove handlers that a test's commands made: their stream is closed with the test."""
    yield
    for handler in tuple(logging.root.handlers):
        if type(handler) is logging.StreamHandler:
            logging.root.removeHandler(handler)
