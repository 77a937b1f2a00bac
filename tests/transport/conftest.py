"""A model directory an echo engine can serve, and a NATS server."""

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from inlay.engine.settings import EngineSettings
from tests.transport.nats_server import NatsServer


@pytest.fixture(scope="session")
def echo_settings(tmp_path_factory: pytest.TempPathFactory) -> EngineSettings:
    path: Path = tmp_path_factory.mktemp("echo")
    config = {"vocab_size": 1000, "hidden_size": 64, "max_position_embeddings": 200_000}
    (path / "config.json").write_text(json.dumps(config), encoding="utf-8")
    # No canary: tests count what the engine was asked.
    return EngineSettings.of(
        model=str(path),
        engine="echo",
        served_model_name=["echo", "mirror"],
        self_check_interval=0,
    )


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[NatsServer]:
    """A server that tests share; each uses a namespace of its own."""
    server = NatsServer(tmp_path_factory.mktemp("nats"))
    server.start()
    yield server
    server.kill()
