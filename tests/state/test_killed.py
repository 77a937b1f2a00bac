"""Background responses outlive the frontend and the worker that make them."""

import os
import signal
import time
from pathlib import Path
from typing import Any

import openai
import pytest

from tests.models import tiny
from tests.parts import workers_of
from tests.serving import serving
from tests.state.test_responses import client_of, ended

pytestmark = pytest.mark.slow

RESPONSES = 8
LONG: dict[str, Any] = {
    "model": "tiny",
    "input": "count the lanterns",
    "max_output_tokens": 350,
    "temperature": 1,
}


def options(folder: Path) -> tuple[object, ...]:
    return (
        tiny("llama"), "--served-model-name", "tiny", "--response-store", folder / "store",
        "--state-dir", folder / "state", "--max-num-seqs", "2",
    )  # fmt: skip


def begun(client: openai.OpenAI) -> list[str]:
    return [
        client.responses.create(
            background=True, extra_body={"seed": seed, "ignore_eos": True}, **LONG
        ).id
        for seed in range(RESPONSES)
    ]


def check_texts(client: openai.OpenAI, ids: list[str]) -> None:
    """Each response has ended with the text of its seed, and its events give the same."""
    for seed, id_ in enumerate(ids):
        found = ended(client, id_)
        alone = client.responses.create(
            store=False, extra_body={"seed": seed, "ignore_eos": True}, **LONG
        )
        assert found.output_text == alone.output_text, seed
        events = list(client.responses.retrieve(id_, stream=True))
        assert [event.sequence_number for event in events] == [*range(len(events))]
        deltas = [one.delta for one in events if one.type == "response.output_text.delta"]
        assert "".join(deltas) == alone.output_text


@pytest.mark.usefixtures("started_processes")
def test_background_responses_outlive_their_frontend(tmp_path: Path) -> None:
    with serving(*options(tmp_path)) as server:
        with client_of(server.url) as client:
            some: set[str | None] = set()
            wait = 1.0
            while not {"queued", "in_progress"} & some:
                wait /= 2  # the faster the machine, the sooner all have ended
                ids = begun(client)
                time.sleep(wait)
                some = {client.responses.retrieve(id_).status for id_ in ids}
        os.kill(server.process.pid, signal.SIGKILL)
        server.process.wait()
    with serving(*options(tmp_path)) as server, client_of(server.url) as client:
        check_texts(client, ids)


@pytest.mark.usefixtures("started_processes")
def test_background_responses_outlive_their_worker(tmp_path: Path) -> None:
    with serving(*options(tmp_path)) as server, client_of(server.url) as client:
        ids = begun(client)
        time.sleep(0.5)
        (worker,) = workers_of(server.process.pid)
        worker.kill()
        check_texts(client, ids)
