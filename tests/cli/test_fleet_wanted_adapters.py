"""Adapters that a file says the workers of a fleet are to have."""

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest
import yaml

from tests.adapters import make_lora
from tests.models import tiny
from tests.parts import Part, running
from tests.serving import free_port
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.slow


@pytest.fixture
def nats(tmp_path: Path) -> Iterator[NatsServer]:
    with NatsServer(tmp_path) as server:
        yield server


def until(done: Callable[[], bool]) -> None:
    while not done():
        pass


def test_workers_have_the_adapters_of_the_file_as_it_changes(
    nats: NatsServer, tmp_path: Path
) -> None:
    for seed, name in enumerate(("one", "two")):
        make_lora(tmp_path / name, tiny("llama"), seed=seed)
    file = tmp_path / "adapters.yaml"

    def want(*names: str) -> None:
        file.write_text(yaml.safe_dump([{"name": n, "path": str(tmp_path / n)} for n in names]))

    port = free_port()
    words = ("--served-model-name", "m", "--enable-lora", "--nats", nats.url)
    more = ("--adapters-file", file, "--dtype", "float32")
    with ExitStack() as stack:
        stack.enter_context(
            running("frontend", "--nats", nats.url, "--port", port, until="HTTP at")
        )
        client = stack.enter_context(httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=120))

        def worker() -> Part:
            part = Part("worker", tiny("llama"), *words, *more, until=" serves ")
            stack.callback(part.end)
            return part.wait_ready()

        def served() -> set[str]:
            found = client.get("/v1/models")
            return {each["id"] for each in found.json().get("data", [])}

        def text(model: str) -> str:
            body = {"model": model, "prompt": "the harbour", "max_tokens": 8, "temperature": 0}
            answer = client.post("/v1/completions", json=body).raise_for_status()
            return str(answer.json()["choices"][0]["text"])

        want("one")
        first = worker()
        until(lambda: served() == {"m", "one"})
        one = text("one")
        want("one", "two")
        until(lambda: served() == {"m", "one", "two"})
        # One that comes later has them too, and answers alike.
        worker()
        first.end()
        until(lambda: served() == {"m", "one", "two"})
        assert text("one") == one
        # A list that cannot be read changes nothing.
        file.write_text("- {name: one}")
        want("two", "gone")
        until(lambda: served() == {"m", "two"})
