"""Fixtures of the store's tests."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.plane.conftest import nats_server
from tests.store.directories import Opened
from tests.store.making import Clock

__all__ = ["nats_server"]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    return tmp_path / "store"


@pytest.fixture
def opened(directory: Path, clock: Clock) -> Iterator[Opened]:
    opened = Opened(directory, clock)
    yield opened
    if opened.last is not None:
        opened.last.close()
