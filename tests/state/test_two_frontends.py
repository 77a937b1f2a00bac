"""A fleet of processes over a real NATS server, whose frontends die or stand still with work."""

import signal
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

import openai
import pytest

from inlay_batches.runner import PIECE_LINES
from tests.batches.test_batches import COMPLETION, line, rows, upload
from tests.models import tiny
from tests.parts import Part
from tests.serving import free_port
from tests.state.test_killed import begun, check_texts
from tests.state.test_responses import client_of
from tests.transport.nats_server import NatsServer

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

LINES = 2 * PIECE_LINES
"""When the first piece is kept, as many are to do."""

ATTEMPTS = 5

TAKEOVERS = "inlay:batch_takeovers_total"


class Frontend:
    """A frontend that keeps all it keeps in NATS."""

    def __init__(self, server: NatsServer) -> None:
        port = free_port()
        self.part = Part(
            "frontend", "--nats", server.url, "--port", port, "--response-store", "nats",
            "--batch-store", "nats", until="HTTP at",
        )  # fmt: skip
        self.client = client_of(f"http://127.0.0.1:{port}")

    def metric(self, name: str) -> float:
        text = self.client.get("/../metrics", cast_to=str)
        found = [each for each in text.splitlines() if each.startswith(f"{name} ")]
        return float(found[0].split()[1])


@pytest.fixture
def frontends(tmp_path: Path) -> Iterator[tuple[Frontend, Frontend]]:
    names = ("--served-model-name", "tiny", "--max-num-seqs", "4", "--dtype", "float32")
    with ExitStack() as stack:
        server = stack.enter_context(NatsServer(tmp_path))
        worker = Part("worker", tiny("llama"), "--nats", server.url, *names, until=" serves ")
        stack.callback(worker.end)
        pair = Frontend(server), Frontend(server)
        for frontend in pair:
            stack.callback(frontend.part.end)
        for part in (worker, *(frontend.part for frontend in pair)):
            part.wait_ready()
        for frontend in pair:
            while frontend.metric("inlay:workers_ready") < 1:
                time.sleep(0.05)
        yield pair


def until_some(client: openai.OpenAI, batch: str, lines: int) -> None:
    """Wait until so many lines of a batch are in its record."""
    while True:
        counts = client.batches.retrieve(batch).request_counts
        if counts is not None and counts.completed >= lines:
            return
        time.sleep(0.1)


def begun_and_stopped(one: Frontend, other: Frontend, data: bytes) -> tuple[str, list[str]]:
    """A batch whose frontend stands still with some of it to do, and responses begun before."""
    for _ in range(ATTEMPTS):
        batch = one.client.batches.create(
            input_file_id=upload(one.client, data),
            endpoint="/v1/completions",
            completion_window="24h",
        ).id
        ids = begun(one.client)
        until_some(other.client, batch, 1)
        one.part.send(signal.SIGSTOP)
        # This process may have been still for longer than a batch takes; then nobody takes over.
        if other.client.batches.retrieve(batch).status != "completed" or other.metric(TAKEOVERS):
            return batch, ids
        one.part.send(signal.SIGCONT)
    raise AssertionError(f"{ATTEMPTS} batches ended before their frontend could be stopped")


@pytest.mark.parametrize("harm", ["killed", "stands still"])
def test_all_that_a_frontend_made_is_made_once_by_another(
    frontends: tuple[Frontend, Frontend], harm: str
) -> None:
    one, other = frontends
    body = {**COMPLETION, "max_tokens": 4}
    data = b"".join(line(f"a{index}", "/v1/completions", body) for index in range(LINES))
    batch, ids = begun_and_stopped(one, other, data)
    if harm == "killed":
        one.part.send(signal.SIGKILL)
    while not other.metric(TAKEOVERS):
        ended = other.client.batches.retrieve(batch).status == "completed"
        assert not ended or other.metric(TAKEOVERS), "nobody took over a batch that has ended"
        time.sleep(0.2)
    if harm != "killed":
        # It believes that all is still its own.
        one.part.send(signal.SIGCONT)
    check_texts(other.client, ids)
    until_some(other.client, batch, LINES)
    while (found := other.client.batches.retrieve(batch)).status != "completed":
        time.sleep(0.1)
    counts = found.request_counts
    assert counts is not None
    assert (counts.total, counts.completed, counts.failed) == (LINES, LINES, 0)
    assert set(rows(other.client, found.output_file_id)) == {f"a{i}" for i in range(LINES)}
    assert found.error_file_id is None
    if harm != "killed":
        assert one.client.batches.retrieve(batch).to_dict() == found.to_dict()
