"""Stored prompts on a NATS server that has no room left."""

import os
import subprocess
from collections.abc import Iterator
from itertools import count
from pathlib import Path

import httpx
import pytest

from tests.commands import run
from tests.parts import running
from tests.serving import free_port
from tests.store.making import upload_of
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.slow

RAW = {"content-type": "application/octet-stream"}


def test_a_stored_prompt_can_be_deleted_when_nothing_more_can_be_stored(tmp_path: Path) -> None:
    limited = f'jetstream {{ store_dir: "{tmp_path}/store", max_file_store: 3MB }}'
    port = free_port()
    with NatsServer(tmp_path, jetstream=False, extra=limited) as nats:
        words = ("--nats", nats.url, "--port", port)
        with (
            running("frontend", *words, until="HTTP at"),
            httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=120) as client,
        ):
            seeds = count()

            def upload(rows: int) -> httpx.Response:
                # Never the same twice.
                content = bytes(upload_of(next(seeds), rows=rows)[0].view)
                return client.post("/prompt_embeds", content=content, headers=RAW)

            ids = []
            # To the last bytes: not even a mark of a deletion has room then.
            for rows in (20_000, 1):
                while (answer := upload(rows)).status_code == 200:
                    ids.append(answer.json()["id"])
                assert (answer.status_code, "no room" in answer.text) == (503, True)
            for id_ in ids:
                answer = client.delete(f"/prompt_embeds/{id_}")
                assert answer.status_code == 200, answer.text
                assert client.get(f"/prompt_embeds/{id_}").status_code == 404
            assert upload(300).status_code == 200


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 8 MB."""
    place = tmp_path / "disk"
    place.mkdir()
    words = ["mount", "-t", "tmpfs", "-o", "size=8m", "tmpfs", str(place)]
    if os.geteuid() != 0 or subprocess.run(words, check=False, timeout=60).returncode != 0:
        pytest.skip("a file system can be mounted by root alone")
    yield place
    run("umount", "--lazy", place)


def test_a_stored_prompt_can_be_deleted_when_the_disk_itself_is_full(
    small_disk: Path, tmp_path: Path
) -> None:
    """NATS then refuses even to remove what it keeps, until it is started again."""
    unlimited = f'jetstream {{ store_dir: "{small_disk}", max_file_store: 1GB }}'
    port = free_port()
    with NatsServer(tmp_path, jetstream=False, extra=unlimited) as nats:
        words = ("--nats", nats.url, "--port", port)
        with (
            running("frontend", *words, until="HTTP at"),
            httpx.Client(base_url=f"http://127.0.0.1:{port}/v1", timeout=120) as client,
        ):
            ids = []
            for seed in count():
                content = bytes(upload_of(seed, rows=20_000)[0].view)
                answer = client.post("/prompt_embeds", content=content, headers=RAW)
                if answer.status_code != 200:
                    break
                ids.append(answer.json()["id"])
            assert answer.status_code == 503
            for id_ in ids:
                answer = client.delete(f"/prompt_embeds/{id_}")
                assert answer.status_code == 200, answer.text
                assert client.get(f"/prompt_embeds/{id_}").status_code == 404
