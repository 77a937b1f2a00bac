"""Published checkpoints, served as `inlay serve` does by default."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from scripts.published import file_of, is_there, obtain

from tests.published.prompts import GEMMA, QWEN
from tests.serving import Served, serving

_MODULES = ("faults", "eight_rows", "gemma", "qwen", "numbers", "gguf")
"""Modules of one model, those that share a server behind each other."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of a model behind each other, so that each of its servers starts once."""
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    places = [items.index(item) for item in own]
    for place, item in zip(places, sorted(own, key=_place), strict=True):
        items[place] = item


def _place(item: pytest.Item) -> tuple[str, int]:
    module = item.path.stem.removeprefix("test_")
    alone = {"eight_rows": GEMMA, "gemma": GEMMA, "qwen": QWEN}.get(module, "")
    named = [each for each in (GEMMA, QWEN) if f"[{each}" in item.name or f"-{each}]" in item.name]
    return (named or [alone])[0], _MODULES.index(module) if module in _MODULES else 0


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
