"""Published checkpoints, served as `inlay serve` does by default."""

import os
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import openai
import pytest
from scripts.published import file_of, is_there, obtain
from xdist.scheduler import LoadScopeScheduling  # type: ignore[import-untyped]

from tests.published.prompts import GEMMA, QWEN
from tests.serving import Served, serving

_MODULES = ("embedders", "faults", "eight_rows", "hidden_states", "decisions", "gemma", "qwen")
"""Modules in their order, then those of both models: what shares a server stands together."""


class ByModel(LoadScopeScheduling):  # type: ignore[misc]
    """Qwen's tests, which are as much as all others together, in one process."""

    def _split_scope(self, nodeid: str) -> str:
        return "Qwen" if QWEN in nodeid or "test_qwen" in nodeid else "others"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> ByModel:
    return ByModel(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Put the tests of a model behind each other, so that each of its servers starts once."""
    own = [item for item in items if item.path.parent == Path(__file__).parent]
    places = [items.index(item) for item in own]
    for place, item in zip(places, sorted(own, key=_place), strict=True):
        items[place] = item


def _place(item: pytest.Item) -> tuple[str, int]:
    module = item.path.stem.removeprefix("test_")
    alone = {"qwen": QWEN, "embedders": ""}.get(module, GEMMA)
    named = [each for each in (GEMMA, QWEN) if f"[{each}" in item.name or f"-{each}]" in item.name]
    at = _MODULES.index(module) if module in _MODULES else len(_MODULES) + (module == "gguf")
    return (named or [alone])[0], at


BEFORE, BEHIND = "<bos><start_of_turn>user\n", "<end_of_turn>\n<start_of_turn>model\n"
TEMPLATES = {GEMMA: "{{ '" + BEFORE + "' + messages[0]['content'] + '" + BEHIND + "' }}"}
"""Of models that have none of their own."""

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
    """The one server that a process runs: more would take memory that machines lack."""

    def __init__(self, template: Path) -> None:
        """`template` is the file to write chat templates into."""
        self._template = template
        self._running = ExitStack()
        self._runs: tuple[Path | str, ...] = ()
        self._served: Served | None = None

    def of(self, name: str, *words: str, gguf: bool = False) -> Served:
        """The server of a checkpoint, with every core and rows allowed, otherwise as it comes.

        Args:
            name: of the checkpoint.
            words: more options.
            gguf: of the file that its directory was made from.
        """
        directory = checkpoint(name)
        path = file_of(name) if gguf else directory
        if self._runs != (path, *words) or self._served is None:
            self.end()
            self._runs = path, *words
            if name in TEMPLATES:
                self._template.write_text(TEMPLATES[name], encoding="utf-8")
                words = (*words, "--chat-template", str(self._template))
            self._served = self._running.enter_context(
                serving(
                    path,
                    "--served-model-name",
                    "m",
                    "--enable-prompt-embeds",
                    "--enable-hidden-states",
                    *words,
                    environment={"OMP_NUM_THREADS": str(os.cpu_count())},
                    within=WITHIN,
                )
            )
        return self._served

    def end(self) -> None:
        self._running.close()
        self._served = None


@pytest.fixture(scope="session")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    servers = Servers(tmp_path_factory.mktemp("template") / "chat.jinja")
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
