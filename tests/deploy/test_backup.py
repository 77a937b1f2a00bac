"""Stored prompts, backed up from one NATS server and restored to another."""

import asyncio
import base64
import io
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import nats
import pytest
import torch

from tests.deploy.tools import ROOT
from tests.equality.reference import rows_of
from tests.live import until
from tests.models import tiny
from tests.parts import running
from tests.serving import free_port
from tests.transport.nats_server import NatsServer

pytestmark = pytest.mark.deploy

SCRIPT = ROOT / "deploy" / "stored_prompts.py"
RAW = {"content-type": "application/octet-stream"}


def script(
    word: str, url: str, given: bytes = b"", **variables: str
) -> "subprocess.CompletedProcess[bytes]":
    environment = {**os.environ, "INLAY_NATS": url, **variables}
    return subprocess.run(
        [sys.executable, str(SCRIPT), word],
        input=given, env=environment, capture_output=True, check=False, timeout=300,
    )  # fmt: skip


def stored(rows: torch.Tensor) -> bytes:
    file = io.BytesIO()
    torch.save(rows.contiguous(), file)
    return file.getvalue()


def test_stored_prompts_are_used_after_they_were_restored_elsewhere(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(os.urandom(32))
    secret.chmod(0o600)
    # One of several chunks, in a snapshot and as a content.
    many = torch.randn(700, 1024, generator=torch.Generator().manual_seed(0))
    prompt = stored(rows_of(tiny("llama"), [5, 6, 7, 8]))
    with server(tmp_path / "a") as old, server(tmp_path / "b") as new, ExitStack() as stack:
        with httpx.Client(
            base_url=stack.enter_context(frontend(old, "--secret-file", secret))
        ) as client:
            ids = [upload(client, data) for data in (stored(many), prompt)]
        saved = script("backup", old.url)
        assert saved.returncode == 0, saved.stderr.decode()
        # Frontends may run already, as long as they have stored nothing.
        url = stack.enter_context(frontend(new, "--secret-file", secret))
        words = ("--served-model-name", "m", "--enable-prompt-embeds", "--nats", new.url)
        stack.enter_context(
            running("worker", tiny("llama"), *words, "--secret-file", secret, until=" serves ")
        )
        done = script("restore", new.url, saved.stdout)
        assert done.returncode == 0, done.stderr.decode()
        with httpx.Client(base_url=url, timeout=120) as client:
            assert client.get(f"/v1/prompt_embeds/{ids[0]}").json()["bytes"] >= many.nbytes
            while client.get("/ready").status_code != 200:
                time.sleep(0.2)
            texts = [
                complete(client, given)
                for given in ({"ref": ids[1]}, base64.b64encode(prompt).decode())
            ]
        assert texts[0] == texts[1]
        again = script("restore", new.url, saved.stdout)
        assert again.returncode == 1
        assert b"has stored prompts already" in again.stderr


@pytest.mark.parametrize("started", ["before", "after"])
def test_a_fleet_whose_secret_is_in_nats_alone_is_restored_with_it(
    started: str, tmp_path: Path
) -> None:
    """As with Compose and systemd; its new members may have made another secret meanwhile."""
    prompt = stored(rows_of(tiny("llama"), [5, 6, 7, 8]))
    with server(tmp_path / "a") as old, server(tmp_path / "b") as new, ExitStack() as stack:
        with frontend(old) as url, httpx.Client(base_url=url) as client:
            id_ = upload(client, prompt)
            saved = script("backup", old.url)
        assert saved.returncode == 0, saved.stderr.decode()
        if started == "before":
            with frontend(new):
                # It looks for what has expired, and says so where prompts are.
                until(lambda: asyncio.run(records(new.url)) == 1)
                done = script("restore", new.url, saved.stdout)
            assert b"start all frontends and workers again" in done.stderr
        else:
            done = script("restore", new.url, saved.stdout)
        assert done.returncode == 0, done.stderr.decode()
        url = stack.enter_context(frontend(new))
        with httpx.Client(base_url=url, timeout=120) as client:
            assert client.get(f"/v1/prompt_embeds/{id_}").raise_for_status().json()["id"] == id_


def test_kept_responses_are_restored_and_can_be_continued(tmp_path: Path) -> None:
    asked = {"model": "m", "input": "the harbour", "max_output_tokens": 4}
    words = (tiny("llama"), "--served-model-name", "m", "--engine", "echo")
    store = ("--response-store", "nats")
    with server(tmp_path / "a") as old, server(tmp_path / "b") as new, ExitStack() as stack:
        with (
            running("worker", *words, "--nats", old.url, until=" serves "),
            frontend(old, *store) as url,
            httpx.Client(base_url=url, timeout=120) as client,
        ):
            until(lambda: client.get("/ready").status_code == 200)
            made = client.post("/v1/responses", json=asked).raise_for_status().json()
            saved = script("backup", old.url)
        assert saved.returncode == 0, saved.stderr.decode()
        done = script("restore", new.url, saved.stdout)
        assert done.returncode == 0, done.stderr.decode()
        stack.enter_context(running("worker", *words, "--nats", new.url, until=" serves "))
        url = stack.enter_context(frontend(new, *store))
        with httpx.Client(base_url=url, timeout=120) as client:
            until(lambda: client.get("/ready").status_code == 200)
            found = client.get(f"/v1/responses/{made['id']}").raise_for_status().json()
            assert found == made
            more = asked | {"previous_response_id": made["id"]}
            client.post("/v1/responses", json=more).raise_for_status()


def test_a_backup_of_another_secret_file_is_refused(tmp_path: Path) -> None:
    files = [tmp_path / name for name in ("one", "two")]
    for file in files:
        file.write_bytes(os.urandom(32))
        file.chmod(0o600)
    with server(tmp_path / "a") as old, server(tmp_path / "b") as new:
        with frontend(old, "--secret-file", files[0]) as url, httpx.Client(base_url=url) as client:
            upload(client, stored(torch.ones(2, 64)))
            saved = script("backup", old.url)
        with frontend(new, "--secret-file", files[1]):
            done = script("restore", new.url, saved.stdout)
    assert done.returncode == 1
    assert b"nothing was restored" in done.stderr


async def records(url: str) -> int:
    """Return the number of records of stored prompts."""
    client = await nats.connect(url)
    try:
        streams = await client.jetstream().streams_info()
        found = {each.config.name: each.state.messages for each in streams}
        return int(found.get("KV_inlay_default_prompts", 0))
    finally:
        await client.close()


def server(directory: Path) -> NatsServer:
    directory.mkdir()
    return NatsServer(directory)


@contextmanager
def frontend(broker: NatsServer, *more: object) -> Iterator[str]:
    port = free_port()
    words = ("--nats", broker.url, "--port", port, *more)
    with running("frontend", *words, until="HTTP at"):
        yield f"http://127.0.0.1:{port}"


def upload(client: httpx.Client, data: bytes) -> str:
    answer = client.post("/v1/prompt_embeds", content=data, headers=RAW, timeout=120)
    return str(answer.raise_for_status().json()["id"])


def complete(client: httpx.Client, given: object) -> str:
    body = {"model": "m", "max_tokens": 8, "temperature": 0, "prompt_embeds": given}
    answer = client.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return str(answer.json()["choices"][0]["text"])
