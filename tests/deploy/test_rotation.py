"""The namespace's secret is changed as its page says: a second fleet, the clients' route, the first.

With real processes on one NATS server, and clients that go on asking.
"""

import os
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from tests.deploy.test_backup import complete, frontend, server, stored, upload
from tests.equality.reference import rows_of
from tests.live import until
from tests.models import tiny
from tests.parts import running
from tests.transport.nats_server import NatsServer

pytestmark = [pytest.mark.deploy, pytest.mark.slow]


def fleet(stack: ExitStack, nats: NatsServer, secret: Path, namespace: str) -> str:
    """Start a worker and a frontend; return its URL once requests are served."""
    own = ("--namespace", namespace, "--secret-file", secret)
    words = ("--served-model-name", "m", "--enable-prompt-embeds", "--nats", nats.url, *own)
    stack.enter_context(running("worker", tiny("llama"), *words, until=" serves "))
    url = stack.enter_context(frontend(nats, *own))
    until(lambda: httpx.get(url + "/ready").status_code == 200)
    return url


def test_a_secret_is_changed_by_a_second_fleet_and_no_request_fails(tmp_path: Path) -> None:
    secrets = [tmp_path / name for name in ("first", "second")]
    for file in secrets:
        file.write_bytes(os.urandom(32))
        file.chmod(0o600)
    rows = stored(rows_of(tiny("llama"), [5, 6, 7, 8]))
    # What clients ask, and where.
    routes: list[tuple[str, dict[str, str]]] = []
    texts: list[tuple[int, str]] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set():
            number, (url, given) = len(routes), routes[-1]
            with httpx.Client(base_url=url, timeout=120) as client:
                texts.append((number, complete(client, given)))

    def asked(number: int) -> bool:
        return asking.done() or sum(one == number for one, _ in texts) >= 3

    with server(tmp_path / "nats") as nats, ExitStack() as first, ExitStack() as second:
        url = fleet(first, nats, secrets[0], "one")
        with httpx.Client(base_url=url) as client:
            old = upload(client, rows)
        routes.append((url, {"ref": old}))
        with ThreadPoolExecutor(1) as threads:
            asking = threads.submit(ask)
            try:
                until(lambda: asked(1))
                url = fleet(second, nats, secrets[1], "two")
                with httpx.Client(base_url=url) as client:
                    assert client.get(f"/v1/prompt_embeds/{old}").status_code == 404
                    new = upload(client, rows)
                assert new != old
                routes.append((url, {"ref": new}))
                until(lambda: asked(2))
                first.close()
                routes.append(routes[-1])
                until(lambda: asked(3))
            finally:
                over.set()
            asking.result()
    assert {number for number, _ in texts} == {1, 2, 3}
    assert len({text for _, text in texts}) == 1
