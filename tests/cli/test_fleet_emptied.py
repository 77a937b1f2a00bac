"""A running fleet whose NATS server comes back with an empty store, as processes."""

import time
from pathlib import Path

import httpx
import pytest

from tests.cli.test_fleet import END_SECONDS, ask, worker
from tests.serving import serving
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.slow


def test_members_that_come_after_the_store_was_emptied_belong_to_the_fleet(tmp_path: Path) -> None:
    with NatsServer(tmp_path) as nats:
        names = ("--nats", nats.url)
        with (
            worker(nats.url, "--served-model-name", "m"),
            serving(*names, command="frontend") as old,
        ):
            assert ask(old)["usage"]["completion_tokens"] == 4
            nats.empty()
            deadline = time.monotonic() + END_SECONDS
            # Heard again, and the secret is written back.
            while httpx.get(old.v1.removesuffix("/v1") + "/ready").status_code != 200:
                assert time.monotonic() < deadline
                time.sleep(0.1)
            with serving(*names, command="frontend") as new:
                for server in (old, new):
                    assert ask(server)["usage"]["completion_tokens"] == 4
                health = httpx.get(new.v1.removesuffix("/v1") + "/health").json()
                assert health["status"] == "ok", health
