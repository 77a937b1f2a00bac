"""All that may happen to a fleet, one after the other, while clients notice nothing.

One fleet of real processes under load: every stream has the tokens that it has in peace, each drill
prints how many ended in it and the longest that a client waited for a token. A Prometheus reads the
rules as they are: no alert fires where no worker is lost.
"""

import base64
import re
import shutil
import signal
import ssl
import threading
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, closing, contextmanager
from pathlib import Path
from typing import Any

import httpx
import msgspec
import psutil
import pytest
import torch
import yaml
from safetensors.torch import load_file, save_file

from tests.adapters import make_lora
from tests.certificates import certificate
from tests.deploy.prometheus import RULES, scraping
from tests.deploy.test_backup import stored
from tests.deploy.tools import tool
from tests.equality.reference import rows_of
from tests.models import tiny
from tests.parts import Part
from tests.serving import free_port
from tests.transport.nats_server import NatsServer

pytestmark = [pytest.mark.deploy, pytest.mark.timeout(900)]

WITHIN = 180.0
TOKENS = 48
TEXT = "the harbour town counts its lanterns every night"
STORE_BYTES = "6MB"
"""Of NATS: what the fleet itself keeps, and few stored prompts."""


class Load:
    """Clients that ask the same again and again, each in a thread, one new connection a stream.

    Attributes:
        answers: tokens that came, by request.
        failed: what went wrong, with the request it went wrong for.
    """

    def __init__(self, url: str, trusted: Path, asked: Sequence[dict[str, Any]]) -> None:
        self._url = url
        self._context = ssl.create_default_context(cafile=str(trusted))
        self._asked = [{**BODY, **one} for one in asked]
        self._stopped = threading.Event()
        self._lock = threading.Lock()
        self.answers: dict[int, set[tuple[int, ...]]] = defaultdict(set)
        self.failed: list[str] = []
        self.ended = [0] * len(asked)
        self._longest = 0.0
        self._threads = [
            threading.Thread(target=self._client, args=(number,), daemon=True)
            for number in range(len(asked))
        ]

    @property
    def trust(self) -> ssl.SSLContext:
        return self._context

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def close(self) -> None:
        self._stopped.set()
        for thread in self._threads:
            thread.join(WITHIN)

    def longest(self) -> float:
        """Longest wait for a token since this was asked before, in seconds."""
        with self._lock:
            longest, self._longest = self._longest, 0.0
        return longest

    def until_each_ended(self, times: int) -> None:
        """Return once every client has had so many more answers, begun since."""
        before = list(self.ended)
        until(
            lambda: (
                bool(self.failed)
                # The first may have begun before.
                or all(now > then + times for then, now in zip(before, self.ended, strict=True))
            )
        )

    def _client(self, number: int) -> None:
        while not self._stopped.is_set():
            try:
                tokens = self._stream(self._asked[number])
            except Exception as error:  # a test's thread: it is told where the drill ends
                self.failed.append(f"request {number}: {error!r}")
                return
            with self._lock:
                self.answers[number].add(tokens)
                self.ended[number] += 1

    def _stream(self, body: dict[str, Any]) -> tuple[int, ...]:
        tokens: list[int] = []
        last = time.monotonic()
        with (
            httpx.Client(verify=self._context, timeout=WITHIN) as client,
            client.stream("POST", f"{self._url}/v1/completions", json=body) as answer,
        ):
            if answer.status_code != 200:
                raise AssertionError(f"{answer.status_code}: {answer.read().decode()}")
            for line in answer.iter_lines():
                if not line.startswith("data: {"):
                    continue
                event = msgspec.json.decode(line.removeprefix("data: "))
                if "error" in event:
                    raise AssertionError(line)
                tokens += event["choices"][0]["token_ids"] or []
                now = time.monotonic()
                with self._lock:
                    self._longest = max(self._longest, now - last)
                last = now
        assert len(tokens) == TOKENS, f"{len(tokens)} tokens"
        return tuple(tokens)


BODY = {
    "model": "m",
    "max_tokens": TOKENS,
    "temperature": 0,
    "ignore_eos": True,
    "stream": True,
    "return_token_ids": True,
}


class Drilled:
    """NATS, a frontend, two workers, and clients before them.

    Attributes:
        expected: tokens of each request while nothing happens.
    """

    def __init__(self, directory: Path, stack: ExitStack, tell: Callable[[str], None]) -> None:
        self._stack = stack
        self._tell = tell
        self._directory = directory
        limited = f'jetstream {{ store_dir: "{directory}/store", max_file_store: {STORE_BYTES} }}'
        self.nats = NatsServer(directory, jetstream=False, extra=limited)
        self.nats.start()
        stack.callback(self.nats.kill)
        self.pair = certificate(directory, "server")
        for number, name in enumerate(("one", "two")):
            make_lora(directory / name, tiny("llama"), seed=number)
        self._adapters = directory / "adapters.yaml"
        self.want("one")
        self.other = _other_weights(directory / "other")
        # What workers serve now.
        self.model: tuple[Any, ...] = (tiny("llama"),)
        port = free_port()
        self.url = f"https://localhost:{port}"
        # Each worker has some of the streams, whatever it has cached.
        policy = ("--router-policy", "least-loaded", "--router-absent-wait", WITHIN)
        words = ("--nats", self.nats.url, "--port", port, *policy)
        tls = ("--ssl-certfile", self.pair[0], "--ssl-keyfile", self.pair[1])
        frontend = self._part("frontend", *words, *tls, until="HTTP at")
        self.workers = [self.worker() for _ in range(2)]
        frontend.wait_ready()
        for part in self.workers:
            part.wait_ready()
        rows = stored(rows_of(tiny("llama"), [5, 6, 7, 8] * 8))
        asked: list[dict[str, Any]] = [
            {"prompt": TEXT},
            {"prompt": TEXT[::-1], "temperature": 0.9, "seed": 7},
            {"prompt_embeds": base64.b64encode(rows).decode()},
            {"prompt": TEXT, "model": "one"},
            {"prompt": list(range(5, 45)), "temperature": 0.8, "seed": 8, "presence_penalty": 0.5},
        ]
        # Each signs itself: clients trust both.
        self.renewed = certificate(directory, "renewed")
        trusted = directory / "trusted.pem"
        trusted.write_bytes(self.pair[0].read_bytes() + self.renewed[0].read_bytes())
        self.load = Load(self.url, trusted, asked)
        self.client = stack.enter_context(
            httpx.Client(base_url=self.url, verify=self.load.trust, timeout=WITHIN)
        )
        self.until_ready(2)
        self.load.start()
        self.load.until_each_ended(2)
        assert not self.load.failed, self.load.failed
        self.expected = {number: set(found) for number, found in self.load.answers.items()}
        assert all(len(found) == 1 for found in self.expected.values())
        self.load.longest()
        self.prometheus = stack.enter_context(
            scraping(_made(directory / "prometheus"), RULES.read_text(), self.url)
        )

    def _part(self, *words: object, until: str) -> Part:
        part = Part(*words, until=until)
        self._stack.callback(part.end)
        return part

    def worker(self) -> Part:
        """One more worker, which is not ready yet."""
        model, *words = self.model
        names = ("--served-model-name", "m", "--dtype", "float32", "--num-threads", 1)
        more = ("--enable-prompt-embeds", "--enable-lora", "--adapters-file", self._adapters)
        fleet = ("--nats", self.nats.url, *words)
        return self._part("worker", model, *names, *more, *fleet, until=" serves ")

    def want(self, *adapters: str) -> None:
        """Set the list of adapters."""
        wanted = [{"name": name, "path": str(self._directory / name)} for name in adapters]
        self._adapters.write_text(yaml.safe_dump(wanted))

    def served(self) -> set[str]:
        """Names that the frontend serves."""
        return {each["id"] for each in self.client.get("/v1/models").json().get("data", [])}

    def ready(self) -> list[dict[str, Any]]:
        """Workers as the frontend's health shows them."""
        found: list[dict[str, Any]] = self.client.get("/health").json().get("workers", [])
        return found

    def until_ready(self, workers: int) -> None:
        until(lambda: len(self.ready()) == workers)

    @contextmanager
    def drill(self, name: str, *alerts: str) -> Iterator[None]:
        """Streams begin before what happens, and others after it: all have their tokens.

        Of all alerts only `alerts` may begin to fire.
        """
        before = sum(self.load.ended)
        fired = self.prometheus.fired()
        self.load.longest()
        yield
        self.load.until_each_ended(1)
        assert not self.load.failed, self.load.failed
        assert self.load.answers == self.expected
        # Seen as it is now, and judged.
        seen = time.time()
        until(lambda: self.prometheus.value("max(timestamp(inlay:workers_ready))") > seen + 1)
        # Certificates of tests end in a day.
        allowed = {*alerts, "InlayCertificateExpires"}
        assert self.prometheus.fired() - fired <= allowed
        ended = sum(self.load.ended) - before
        self._tell(f"\n{name}: {ended} streams, longest wait {self.load.longest():.2f} s")


def until(done: Callable[[], bool]) -> None:
    deadline = time.monotonic() + WITHIN
    while not done():
        assert time.monotonic() < deadline
        time.sleep(0.05)


def _made(directory: Path) -> Path:
    directory.mkdir()
    return directory


def _other_weights(directory: Path) -> Path:
    """The same model with other weights."""
    shutil.copytree(tiny("llama"), directory)
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].roll(1, 0).contiguous()
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


@pytest.fixture(scope="module")
def fleet(
    tmp_path_factory: pytest.TempPathFactory, pytestconfig: pytest.Config
) -> Iterator[Drilled]:
    capture = pytestconfig.pluginmanager.getplugin("capturemanager")

    def tell(line: str) -> None:
        """Have it seen though the test passes."""
        with capture.global_and_fixture_disabled():
            print(line)

    tool("prometheus")  # or nothing is started
    with ExitStack() as stack:
        fleet = Drilled(tmp_path_factory.mktemp("drills"), stack, tell)
        # Before its workers end.
        with closing(fleet.load):
            yield fleet


def replaced(fleet: Drilled, how: signal.Signals) -> None:
    """A worker ends by a signal, and another comes."""
    ready = len(fleet.workers)
    fleet.workers.pop(0).send(how)
    fleet.until_ready(ready - 1)
    fleet.workers.append(fleet.worker().wait_ready())
    fleet.until_ready(ready)


def test_a_worker_is_drained_and_replaced(fleet: Drilled) -> None:
    with fleet.drill("a drained worker"):
        replaced(fleet, signal.SIGTERM)


@pytest.mark.parametrize("emptied", [False, True], ids=["lost", "wiped"])
def test_nats_is_lost(fleet: Drilled, emptied: bool) -> None:
    with fleet.drill(f"NATS {'wiped' if emptied else 'lost'}"):
        fleet.nats.kill()
        fleet.load.until_each_ended(1)
        if emptied:
            fleet.nats.empty()
        else:
            fleet.nats.start()
        until(lambda: value(fleet, "inlay:discovery_reachable") == 1)
        fleet.until_ready(2)


def test_a_certificate_is_renewed(fleet: Drilled) -> None:
    with fleet.drill("certificate renewed"):
        ends = value(fleet, "inlay:certificate_expiry_seconds")
        for new, used in zip(fleet.renewed, fleet.pair, strict=True):
            shutil.copyfile(new, used)
        pem = ssl.PEM_cert_to_DER_cert(fleet.renewed[0].read_text())
        port = int(fleet.url.rpartition(":")[2])
        until(
            lambda: ssl.PEM_cert_to_DER_cert(ssl.get_server_certificate(("localhost", port))) == pem
        )
        assert value(fleet, "inlay:certificate_expiry_seconds") >= ends


def test_the_list_of_adapters_changes(fleet: Drilled) -> None:
    with fleet.drill("adapters"):
        fleet.want("one", "two")
        until(lambda: fleet.served() == {"m", "one", "two"})
        fleet.want("one")
        until(lambda: fleet.served() == {"m", "one"})


def test_the_disk_is_full(fleet: Drilled) -> None:
    raw = {"content-type": "application/octet-stream"}
    seeds = iter(range(1000))

    def upload() -> httpx.Response:
        rows = torch.randn(2000, 48, generator=torch.Generator().manual_seed(next(seeds)))
        return fleet.client.post("/v1/prompt_embeds", content=stored(rows), headers=raw)

    with fleet.drill("disk full"):
        ids = []
        while (answer := upload()).status_code == 200:
            ids.append(answer.json()["id"])
        assert answer.status_code == 503, answer.text
        fleet.load.until_each_ended(1)
        for id_ in ids:
            assert fleet.client.delete(f"/v1/prompt_embeds/{id_}").status_code == 200
        assert upload().status_code == 200


def test_a_model_is_changed(fleet: Drilled) -> None:
    """First a share of the requests, then all: each stream is of one of the two weights."""
    first = {number: set(found) for number, found in fleet.expected.items()}
    old = len(fleet.workers)
    fleet.model = (fleet.other, "--weight", 1)
    new = [fleet.worker().wait_ready()]
    fleet.until_ready(old + 1)
    until(
        lambda: (
            bool(fleet.load.failed) or all(len(found) == 2 for found in fleet.load.answers.values())
        )
    )
    assert not fleet.load.failed, fleet.load.failed
    fleet.expected = {number: set(found) for number, found in fleet.load.answers.items()}
    with fleet.drill("model changed"):
        new.append(fleet.worker().wait_ready())
        for part in fleet.workers:
            part.send(signal.SIGTERM)
        fleet.workers = new
        fleet.until_ready(2)
    # From here on there is one answer again, the new one.
    fleet.load.until_each_ended(1)
    fleet.load.answers.clear()
    fleet.load.until_each_ended(1)
    for number, found in fleet.load.answers.items():
        assert found == fleet.expected[number] - first[number]
    fleet.expected = {number: set(found) for number, found in fleet.load.answers.items()}


def test_workers_go_from_one_to_none_to_three(fleet: Drilled) -> None:
    # With none for longer than a minute it would be right to fire.
    with fleet.drill("1 to 0 to 3 workers", "InlayNoWorkerWell"):
        for left, part in ((1, fleet.workers[0]), (0, fleet.workers[1])):
            part.send(signal.SIGTERM)
            fleet.until_ready(left)
        until(lambda: value(fleet, "inlay:router_requests_waiting") == len(fleet.expected))
        fleet.workers = [fleet.worker() for _ in range(3)]
        for part in fleet.workers:
            part.wait_ready()
        fleet.until_ready(3)


LOST = ("InlayWorkersLost", "InlayRequestsMoved")


def test_a_worker_is_killed_and_replaced(fleet: Drilled) -> None:
    with fleet.drill("a killed worker", *LOST):
        replaced(fleet, signal.SIGKILL)
    until(lambda: "InlayWorkersLost" in fleet.prometheus.fired())


def test_a_worker_is_frozen_and_goes_on(fleet: Drilled) -> None:
    with fleet.drill("a frozen worker", *LOST):
        top = psutil.Process(fleet.workers[0].process.pid)
        frozen = [top, *top.children(recursive=True)]
        for process in frozen:
            process.suspend()
        fleet.until_ready(len(fleet.workers) - 1)
        fleet.load.until_each_ended(1)
        for process in frozen:
            process.resume()
        fleet.until_ready(len(fleet.workers))


def value(fleet: Drilled, name: str) -> float:
    """The sum of a metric's series."""
    lines = fleet.client.get("/metrics").text.splitlines()
    return sum(float(line.split()[-1]) for line in lines if re.match(rf"{name}[ {{]", line))
