"""A running fleet whose NATS server comes back with an empty store, as processes."""

import asyncio
from pathlib import Path

import httpx
import nats as client_of
import pytest
from nats.js.errors import NotFoundError

from inlay.transport.nats.subjects import Subjects
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
            # A member that came earlier would make a secret of its own.
            asyncio.run(asyncio.wait_for(secret_is_written_back(nats.url), END_SECONDS))
            with serving(*names, command="frontend") as new:
                for server in (old, new):
                    assert ask(server)["usage"]["completion_tokens"] == 4
                health = httpx.get(new.v1.removesuffix("/v1") + "/health").json()
                assert health["status"] == "ok", health


async def secret_is_written_back(url: str) -> None:
    """Return once the namespace has a secret."""
    client = await client_of.connect(url)
    try:
        while True:
            try:
                facts = await client.jetstream().key_value(Subjects("default").namespace_facts)
                await facts.get("secret")
                return
            except NotFoundError:
                await asyncio.sleep(0.1)
    finally:
        await client.close()
