"""Frontends that are killed while they run a batch; another, of the same store, goes on with it."""

import os
import random
import signal
import time
from pathlib import Path

import httpx
import pytest

from inlay_batches.lines import seed_of
from tests.batches.test_batches import COMPLETION, client_of, line, rows, upload
from tests.models import tiny
from tests.serving import serving

pytestmark = pytest.mark.slow

LINES = 600


@pytest.mark.usefixtures("started_processes")
def test_a_batch_outlives_frontends_killed_at_random_times(tmp_path: Path) -> None:
    options = (
        tiny("llama"), "--served-model-name", "tiny", "--batch-store", tmp_path / "store",
        "--state-dir", tmp_path / "state", "--max-num-seqs", "8",
    )  # fmt: skip
    body = {**COMPLETION, "max_tokens": 8}
    data = b"".join(line(f"id-{index}", "/v1/completions", body) for index in range(LINES))
    drawn = random.Random(3)
    batch = ""
    # The second takes it over after the first was silent for so long.
    for seconds in (1.5, 19.0):
        with serving(*options) as server:
            client = client_of(server.url)
            if not batch:
                batch = client.batches.create(
                    input_file_id=upload(client, data),
                    endpoint="/v1/completions",
                    completion_window="24h",
                ).id
            time.sleep(seconds + drawn.uniform(0, 2))
            os.kill(server.process.pid, signal.SIGKILL)
            server.process.wait()
    with serving(*options) as server:
        client = client_of(server.url)
        deadline = time.monotonic() + 120
        while (found := client.batches.retrieve(batch)).status != "completed":
            assert time.monotonic() < deadline, found
            time.sleep(0.2)
        output = rows(client, found.output_file_id)
        assert set(output) == {f"id-{index}" for index in range(LINES)}
        assert found.error_file_id is None
        counts = found.request_counts
        assert counts is not None
        assert (counts.total, counts.completed, counts.failed) == (LINES, LINES, 0)
        # Computed again, a line has the same answer: its seed is its own.
        answer = httpx.post(
            f"{server.url}/v1/completions",
            json={**body, "seed": seed_of(batch, "id-0")},
        ).json()
        text = output["id-0"]["response"]["body"]["choices"][0]["text"]
        assert answer["choices"][0]["text"] == text
