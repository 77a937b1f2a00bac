"""Published checkpoints, served as `inlay serve` does by default."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from scripts.published import file_of, is_there, obtain

from tests.serving import Served, serving

WITHIN = 400.0
"""Seconds for a start on a busy machine."""


def checkpoint(name: str) -> Path:
    """The model's directory.

    Never fetched by a test, which would take the time that another one has.
    """
    if not is_there(name):
        pytest.fail(f"{name} is not there: `make test-published` fetches it", pytrace=False)
    return obtain(name)


class Servers:
    """The one server that runs: several models at once would take memory that machines lack.

    Tests of one model stand behind each other, so that it starts once.
    """

    def __init__(self) -> None:
        self._running = ExitStack()
        self._runs: tuple[Path, str] | None = None
        self._served: Served | None = None

    def of(self, name: str, *, gguf: bool = False, activations: str = "auto") -> Served:
        """The server of a checkpoint, with every core and rows allowed, otherwise as it comes.

        Args:
            name: of the checkpoint.
            gguf: of the file that its directory was made from.
            activations: what weights in blocks are multiplied with.
        """
        directory = checkpoint(name)
        path = file_of(name) if gguf else directory
        if self._runs != (path, activations) or self._served is None:
            self.end()
            self._served = self._running.enter_context(
                serving(
                    path,
                    "--served-model-name",
                    "m",
                    "--enable-prompt-embeds",
                    "--enable-hidden-states",
                    "--activations",
                    activations,
                    environment={"OMP_NUM_THREADS": str(os.cpu_count())},
                    within=WITHIN,
                )
            )
            self._runs = path, activations
        return self._served

    def end(self) -> None:
        self._running.close()
        self._served = None


@pytest.fixture(scope="session")
def servers() -> Iterator[Servers]:
    servers = Servers()
    yield servers
    servers.end()


@pytest.fixture(scope="module")
def server(servers: Servers, name: str) -> Served:
    """Of the checkpoint that the module calls `name`."""
    return servers.of(name)


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0, timeout=400) as client:
        yield client


@pytest.fixture(scope="module")
def http(server: Served) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=400) as client:
        yield client
