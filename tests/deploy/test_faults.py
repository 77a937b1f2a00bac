"""Every alert is fired by the fault it is for: a real fleet, broken piece by piece.

A real Prometheus reads the rules as they are, but that no state need last, and that yesterday is
five seconds ago. What a test has broken is broken in those after it: any may be left out, but they
run in this order.
"""

import ast
import asyncio
import json
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import httpx
import nats
import psutil
import pytest
import torch
import yaml

from tests.certificates import certificate
from tests.deploy.chart import CHART
from tests.deploy.prometheus import RULES, Prometheus, lasting, scraping, until
from tests.deploy.test_backup import stored
from tests.deploy.tools import tool
from tests.models import tiny
from tests.parts import Part, workers_of
from tests.serving import free_port
from tests.transport.nats_server import NatsServer

pytestmark = [pytest.mark.deploy, pytest.mark.slow, pytest.mark.timeout(900)]

WITHOUT_A_FAULT = {"InlayPayloadsLeft"}
"""What stays after all requests have ended, is freed within seconds: only an error in the code
would leave it. rules_test.yaml has its series."""
INFLIGHT = 32
ALONE = {"authorization": "Bearer sk-alone"}
LIMITED = {"authorization": "Bearer sk-limited"}


class Way:
    """A way to a server that can be cut: what connects to `port` reaches `target`."""

    def __init__(self, target: int) -> None:
        self._target = target
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port = self._listener.getsockname()[1]
        self._open: list[socket.socket] = []
        threading.Thread(target=self._accept, daemon=True).start()

    def _accept(self) -> None:
        with suppress(OSError):  # it is cut
            while True:
                here, _ = self._listener.accept()
                there = socket.create_connection(("127.0.0.1", self._target))
                self._open += [here, there]
                for ends in ((here, there), (there, here)):
                    threading.Thread(target=self._pass, args=ends, daemon=True).start()

    def _pass(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):  # one end is gone, so the other goes
            while data := source.recv(1 << 16):
                sink.sendall(data)
        for end in (source, sink):
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """End all that passes, for good."""
        with suppress(OSError):  # it is cut
            # Ends a wait for the next, as closing alone does not.
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        for end in self._open:
            with suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()


class Breakable:
    """NATS with its metrics, two frontends, echo engines of `m`, and Prometheus.

    Attributes:
        keys: the first frontend's file of keys.
        way: of the second frontend to NATS; it has a certificate that ends in a day.
    """

    def __init__(self, directory: Path, stack: ExitStack) -> None:
        self._directory = directory
        self._stack = stack
        monitor, metrics = free_port(), free_port()
        limited = f'jetstream {{ store_dir: "{directory}/store", max_file_store: 50MB }}'
        watched = f'http: "127.0.0.1:{monitor}"'
        self.nats = NatsServer(directory, jetstream=False, extra=f"{limited}\n{watched}")
        self.nats.start()
        stack.callback(self.nats.kill)
        script = CHART / "files" / "nats_metrics.py"
        words = [sys.executable, script, f"http://127.0.0.1:{monitor}", metrics, 1]
        sidecar = subprocess.Popen(list(map(str, words)))
        stack.callback(sidecar.wait)
        stack.callback(sidecar.kill)
        self.way = Way(self.nats.port)
        stack.callback(self.way.cut)
        self.keys = directory / "keys.yaml"
        self.write_keys()
        self.frontends: list[Part] = []
        pair = certificate(directory, "pair")
        tls = ("--ssl-certfile", pair[0], "--ssl-keyfile", pair[1])
        bounds = ("--max-inflight-requests", INFLIGHT, "--prompt-store-nats-bytes", 1 << 20)
        waits = ("--router-policy", "round-robin", "--router-absent-wait", 300)
        urls = []
        for nats_port, scheme, more in (
            (self.nats.port, "http", ("--api-key-file", self.keys, *bounds, *waits)),
            (self.way.port, "https", tls),
        ):
            port = free_port()
            urls.append(f"{scheme}://127.0.0.1:{port}")
            own = ("--nats", f"nats://127.0.0.1:{nats_port}", "--port", port)
            self.frontends.append(self._part("frontend", *own, *more, until="HTTP at"))
        self.url = urls[0]
        self.workers = [self.worker() for _ in range(2)]
        for part in (*self.workers, *self.frontends):
            part.wait_ready()
        self.client = stack.enter_context(httpx.Client(base_url=self.url, timeout=600))
        rules = lasting(0)
        assert "[1d] offset 1h" in rules
        rules = rules.replace("[1d] offset 1h", "[1h] offset 5s")
        targets = (*urls, f"http://127.0.0.1:{metrics}")
        self.prometheus: Prometheus = stack.enter_context(scraping(directory, rules, *targets))
        self.until_workers(2)

    def _part(self, *words: object, until: str) -> Part:
        part = Part(*words, until=until)
        self._stack.callback(part.end)
        return part

    def worker(self, model: Path | None = None, *words: object) -> Part:
        """One more, an echo engine of `m` unless told otherwise."""
        own = words or ("--engine", "echo", "--served-model-name", "m", "--enable-prompt-embeds")
        more = (*own, "--nats", self.nats.url)
        return self._part("worker", model or tiny("llama"), *more, until=" serves ")

    def write_keys(self) -> None:
        """Keys of a client alone and of one that may ask once a minute."""
        entries = [
            {"name": "alone", "key": "sk-alone", "max_requests": 2 * INFLIGHT},
            {"name": "limited", "key": "sk-limited", "rate": 1},
        ]
        self.keys.write_text(json.dumps(entries))
        self.keys.chmod(0o600)

    def until_workers(self, count: int) -> None:
        """Return once the first frontend was seen to have so many."""
        job = '{instance="' + self.url.partition("://")[2] + '"}'
        until(lambda: self.prometheus.value(f"inlay:workers_ready{job}") == count)

    def ask(self, *, model: str = "m", headers: dict[str, str] = ALONE, **fields: Any) -> int:
        """The status of a request to the first frontend."""
        body = {"model": model, "prompt": "the harbour", "max_tokens": 4, **fields}
        return self.client.post("/v1/completions", json=body, headers=headers).status_code

    def asking(self, number: int) -> list[threading.Thread]:
        """So many requests, under way."""
        threads = [threading.Thread(target=self.ask, daemon=True) for _ in range(number)]
        for thread in threads:
            thread.start()
        return threads

    def fires(self, alert: str, again: Callable[[], object] = lambda: None) -> None:
        """Return once it has fired, doing this again and again."""

        def fired() -> bool:
            if alert in self.prometheus.fired():
                return True
            again()
            return False

        try:
            until(fired)
        except AssertionError:
            weights = self.prometheus.ask("/api/v1/query", query="inlay:weights_share")
            raise AssertionError(f"{alert}: {self.prometheus.firing()} fire {weights}") from None


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Breakable]:
    tool("prometheus")  # or nothing is started
    with ExitStack() as stack:
        yield Breakable(tmp_path_factory.mktemp("faults"), stack)


def test_a_certificate_ends_soon(fleet: Breakable) -> None:
    fleet.fires("InlayCertificateExpires")


def test_a_file_of_keys_is_broken(fleet: Breakable) -> None:
    fleet.keys.write_text("- name: [")
    fleet.fires("InlayFilesNotRead")
    fleet.write_keys()
    until(lambda: "InlayFilesNotRead" not in fleet.prometheus.firing())


def test_a_client_asks_for_more_than_it_may(fleet: Breakable) -> None:
    assert fleet.ask(headers=LIMITED) == 200
    assert fleet.ask(headers=LIMITED) == 429
    fleet.fires("InlayClientsLimited", lambda: fleet.ask(headers=LIMITED))


def test_uploads_push_out_what_is_stored(fleet: Breakable) -> None:
    raw = {"content-type": "application/octet-stream", **ALONE}
    seeds = iter(range(10_000))

    def upload() -> None:
        for _ in range(10):
            rows = torch.randn(300, 48, generator=torch.Generator().manual_seed(next(seeds)))
            answer = fleet.client.post("/v1/prompt_embeds", content=stored(rows), headers=raw)
            assert answer.status_code == 200, answer.text

    fleet.fires("InlayStoredPromptsEvicted", upload)


def test_a_worker_cannot_be_reached(fleet: Breakable) -> None:
    # Nothing listens where it says that it is.
    way = ("--transport-host", "127.0.0.66", "--transport-bind", "127.0.0.1")
    words = ("--engine", "echo", "--served-model-name", "m", *way)
    part = fleet.worker(tiny("llama"), *words).wait_ready()
    fleet.fires("InlayWorkersMissing")
    part.end()


def test_a_worker_is_frozen_with_requests(fleet: Breakable) -> None:
    top = psutil.Process(fleet.workers[0].process.pid)
    frozen = [top, *top.children(recursive=True)]

    def freeze() -> None:
        for process in frozen:
            process.suspend()
        for thread in fleet.asking(16):
            thread.join()
        for process in frozen:
            process.resume()
        fleet.until_workers(2)

    for alert in ("InlayWorkerSilent", "InlayRequestsMoved", "InlayWorkersLost"):
        fleet.fires(alert, freeze)


def test_a_frontend_does_not_hear_of_other_weights(fleet: Breakable, tmp_path: Path) -> None:
    fleet.way.cut()
    other = shutil.copytree(tiny("llama"), tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps({**config, "of": "other weights"}))
    words = ("--engine", "echo", "--served-model-name", "m", "--weight", 1)
    fleet.workers.append(fleet.worker(other, *words).wait_ready())
    fleet.until_workers(3)
    fleet.fires("InlayWeightsDisagree")
    fleet.fires("InlayTwoWeights")
    fleet.fires("InlayNatsLost")
    # What follows has one frontend.
    fleet.frontends.pop().end()


def test_all_workers_are_lost_and_requests_come(fleet: Breakable) -> None:
    for part in fleet.workers:
        part.send(signal.SIGKILL)
    fleet.until_workers(0)
    fleet.fires("InlayNoWorkerWell")
    late = {**ALONE, "x-request-timeout": "0.2"}
    assert fleet.ask(headers=late) == 504
    fleet.fires("InlayFailing", lambda: fleet.ask(headers=late))
    waiting: list[threading.Thread] = []
    began = time.monotonic()

    def more() -> None:
        if len(waiting) < INFLIGHT:
            waiting.extend(fleet.asking(1))

    fleet.fires("InlayQueueGrowing", more)
    # More than the frontend takes at a time.
    fleet.fires("InlayRefusing", lambda: waiting.extend(fleet.asking(4)))
    until(lambda: time.monotonic() - began > 12)
    fleet.workers = [fleet.worker().wait_ready()]
    for thread in waiting:
        thread.join()
    fleet.fires("InlaySlowFirstToken")


@pytest.fixture(scope="module")
def divided(fleet: Breakable) -> Part:
    """A worker of `t` whose model is on two processes, with a small cache."""
    cache = ("--kv-cache-memory-bytes", 160 * 1024, "--max-num-seqs", 8, "--self-check", "off")
    ranks = ("--tensor-parallel-size", 2, "--num-threads", 1, "--dtype", "float32")
    probes = ("--health-probe-interval", 1, "--health-probe-timeout", 10)
    words = ("--served-model-name", "t", *cache, *ranks, *probes)
    part = fleet.worker(tiny("llama"), *words).wait_ready()
    until(lambda: fleet.ask(model="t") == 200)
    return part


def test_prompts_are_no_longer_found_cached(fleet: Breakable, divided: Part) -> None:
    numbers = iter(range(1_000_000))
    ratio = 'model:inlay_cache_hits:ratio_rate10m{model_name="t"}'

    def prompt(first: int) -> list[int]:
        return [5 + (first + at * at) % 300 for at in range(256)]

    def same() -> bool:
        fleet.ask(model="t", prompt=prompt(0), max_tokens=1)
        return fleet.prometheus.value(f"min_over_time({ratio}[8s])") > 0.6

    until(same)
    fleet.fires(
        "InlayCacheHitsFell",
        lambda: fleet.ask(model="t", prompt=prompt(next(numbers)), max_tokens=1),
    )


def test_a_cache_is_too_small(fleet: Breakable, divided: Part) -> None:
    def crowd() -> None:
        threads = [
            threading.Thread(
                target=fleet.ask,
                kwargs={"model": "t", "prompt": [5 + at] * 64, "max_tokens": 400,
                        "ignore_eos": True},
                daemon=True,
            )
            for at in range(8)
        ]  # fmt: skip
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()

    fleet.fires("InlayCacheFull", crowd)


def test_a_device_of_a_worker_does_not_answer(fleet: Breakable, divided: Part) -> None:
    (engine,) = workers_of(divided.process.pid)
    (rank,) = [each for each in engine.children() if "--multiprocessing-fork" in each.cmdline()]
    rank.suspend()
    try:
        fleet.fires("InlayWorkerUnwell")
    finally:
        rank.resume()


def test_nats_is_full_and_then_gone(fleet: Breakable) -> None:
    async def fill() -> None:
        client = await nats.connect(fleet.nats.url)
        try:
            stream = client.jetstream()
            await stream.add_stream(name="others", subjects=["others.>"])
            for _ in range(90):
                await stream.publish("others.one", bytes(512 * 1024))
        finally:
            await client.close()

    asyncio.run(fill())
    fleet.fires("InlayNatsStoreFull")
    fleet.nats.kill()
    fleet.fires("InlayNatsServerMissing")


def test_all_frontends_are_gone(fleet: Breakable) -> None:
    for part in fleet.frontends:
        part.send(signal.SIGKILL)
    fleet.fires("InlayFrontendsGone")


def test_each_alert_is_fired_by_a_test_of_this_file() -> None:
    groups = yaml.safe_load(RULES.read_text())["groups"]
    alerts = {rule["alert"] for group in groups for rule in group["rules"] if "alert" in rule}
    tests = [
        part
        for part in ast.parse(Path(__file__).read_text()).body
        if isinstance(part, ast.FunctionDef)
    ]
    named = {
        word.value for test in tests for word in ast.walk(test) if isinstance(word, ast.Constant)
    }
    assert alerts - named == WITHOUT_A_FAULT
