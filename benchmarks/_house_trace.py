"""Files and calls of inlay that one streamed chat of two tokens enters, by process."""

import http.client
import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import reduce
from operator import and_
from pathlib import Path
from typing import NamedTuple

from benchmarks._serving import Server, free_port

ROOT = Path(__file__).resolve().parent.parent
MODEL = ROOT / "src" / "inlay" / "demo" / "model"
CHAT = {
    "messages": [{"role": "user", "content": "What is the capital of France?"}],
    "max_tokens": 2,
    "temperature": 0,
    "stream": True,
}
SECONDS = 1.0
"""Length of the traced interval, and of the idle one that is taken from it."""
START_SECONDS = 300.0
"""A traced start takes several times as long as another."""
TRACES = 3
"""Chats that are traced, of which the least counts: being woken more often only adds calls."""


class Trace(NamedTuple):
    """Calls by `file:function`, files relative to src/."""

    frontend: Counter[str]
    worker: Counter[str]


def files(calls: Counter[str]) -> Counter[str]:
    """Return the calls by file."""
    found: Counter[str] = Counter()
    for name, count in calls.items():
        found[name.partition(":")[0]] += count
    return found


def traced_chat() -> Trace:
    """Serve the bundled model; trace a chat after two others, less what an idle server does."""
    with tempfile.TemporaryDirectory() as folder, _served(Path(folder)) as server:
        body = json.dumps({**CHAT, "model": "m"}).encode()
        for _ in range(2):
            _chat(server, body)
        # The server ends a request after its client has the answer.
        time.sleep(SECONDS)
        chats = [
            _interval(server, Path(folder), lambda: _chat(server, body)) for _ in range(TRACES)
        ]
        idle = _interval(server, Path(folder), lambda: None)
    frontend, worker = (reduce(and_, each) for each in zip(*chats, strict=True))
    return Trace(frontend - idle.frontend, worker - idle.worker)


@contextmanager
def _served(folder: Path) -> Iterator[Server]:
    port = free_port()
    command = [
        sys.executable, "-m", "inlay.cli", "serve", str(MODEL), "--served-model-name", "m",
        "--port", str(port), "--self-check-interval", "0", "--health-probe-interval", "0",
    ]  # fmt: skip
    environment = {
        **os.environ,
        "PYTHONPATH": os.pathsep.join([str(ROOT / "benchmarks" / "_traced"), str(ROOT / "src")]),
        "HOUSE_TRACE": str(folder),
        "HOUSE_ROOT": f"{ROOT / 'src'}/",
    }
    with (folder / "log").open("wb") as log:
        process = subprocess.Popen(command, env=environment, stdout=log, stderr=log)
    server = Server("inlay", port, (process.pid,))
    try:
        _wait_ready(server, process, folder / "log")
        yield server
    finally:
        process.terminate()
        process.wait()


def _wait_ready(server: Server, process: "subprocess.Popen[bytes]", log: Path) -> None:
    found, deadline = "no answer", time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if process.poll() is not None:
            found = f"it ended with {process.returncode}"
            break
        try:
            status, answer = server.get("/health")
        except (OSError, http.client.HTTPException) as error:
            found = repr(error)
        else:
            if status == 200:
                return
            found = f"{status} {answer.decode()}"
        time.sleep(0.2)
    said = log.read_text(encoding="utf-8")
    raise RuntimeError(f"the server is not ready: {found}; it said: {said[-4000:]}")


def _chat(server: Server, body: bytes) -> None:
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=60)
    connection.request("POST", "/v1/chat/completions", body, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    text = answer.read().decode()
    connection.close()
    if answer.status != 200 or "[DONE]" not in text:
        raise RuntimeError(f"the chat failed: {answer.status} {text}")


def _interval(server: Server, folder: Path, act: Callable[[], None]) -> Trace:
    pids = [pid for pid in server.every_pid() if _is_traced(pid)]
    _signal(pids, signal.SIGUSR1)
    began = time.monotonic()
    act()
    time.sleep(max(0.0, SECONDS - (time.monotonic() - began)))
    _signal(pids, signal.SIGUSR2)
    paths = [folder / f"{pid}.json" for pid in pids]
    while not all(path.exists() for path in paths):
        time.sleep(0.05)
    found = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    for path in paths:
        path.unlink()
    front = Counter(found[0]["calls"])
    rest: Counter[str] = Counter()
    for each in found[1:]:
        rest.update(each["calls"])
    return Trace(front, rest)


def _is_traced(pid: int) -> bool:
    """True for a process that has set its handlers: others would end of the signal."""
    status = Path(f"/proc/{pid}/status").read_text(encoding="ascii")
    caught = int(status.partition("SigCgt:")[2].split()[0], 16)
    return bool(caught >> (signal.SIGUSR1 - 1) & caught >> (signal.SIGUSR2 - 1) & 1)


def _signal(pids: list[int], number: int) -> None:
    for pid in pids:
        os.kill(pid, number)
    time.sleep(0.2)
