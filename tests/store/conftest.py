"""Fixtures of the store's tests."""

from collections.abc import AsyncIterator, Iterator
from pathlib import Path

import pytest

from tests.store.directories import Opened
from tests.store.frontends import Frontends
from tests.store.making import Clock
from tests.transport.conftest import nats_server
from tests.transport.nats_server import NatsServer

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


@pytest.fixture
async def frontends(nats_server: NatsServer, clock: Clock) -> AsyncIterator[Frontends]:
    made = Frontends(nats_server, clock)
    yield made
    await made.close()
