"""What a small request waits while large prompts of embeddings arrive.

One process asks a server the same small prompt of ids, cached, again and again, and its times are
what is measured. Another sends the same prompt of embeddings, cached too, back to back, so that
what arrives and is taken in is what disturbs, and not the model. Each server gets its turns in
rounds of four:

    quiet    nothing large is sent
    ids      the same large prompts are sent as ids: what they cost the engine
    sink     the large bodies go to a process that reads and drops them: what the machine alone does to the small request
    loud     they go to the server

inlay is measured twice, with a model and with the echo engine, which computes nothing: what is
waited for there is the way in alone. All processes share this machine's cores, so a request may
also wait because a thread that serves it waits for a core. Two things tell how much that is. After
each small request a bystander is asked, a process that answers at once and has nothing to do with
the server. And the system counts how long each thread was ready to run and did not; `queued` is
that of the threads that the longest request went through: the asking one, the main thread of each
process of the server, and what else runs in its worker.

Large bodies are sent by a process of lower priority, as one on another machine would not take a
core from the server, and in pieces, since a kernel may not take the core from a process within one
call.

    python -m benchmarks.stalls [--mb 64] [--seconds 6] [--rounds 3] [--servers echo,inlay,vllm]

What waits were, by `perf sched`: full garbage collections (mended: `base.pace.freeze_gc`), threads
that prepare a large prompt (they give their core up each millisecond), the end of the engine's
step, and the kernel's own network thread. Tried without gain: `sched_yield` instead of sleeping.
"""

import contextlib
import http.client
import json
import multiprocessing
import os
import socket
import statistics
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from safetensors.torch import load_file

from benchmarks import _serving
from benchmarks._options import parser_of
from benchmarks._serving import Server
from benchmarks.cached_prompt import forms_of

PAUSE = 0.002
"""Seconds between one small request's answer and the next one."""

PIECE = 256 * 1024
"""Bytes of a large body handed to the system in one call."""

POLITE = 10
"""How much nicer the processes are that send large bodies, and that drop them."""


def sink(port: int, niceness: int) -> None:
    """Answer every request on `port` once its body has been read and dropped."""
    os.nice(niceness)
    listening = socket.create_server(("127.0.0.1", port))
    room = bytearray(1 << 20)
    while True:
        connection, _ = listening.accept()
        with connection, connection.makefile("rb", buffering=0) as stream:
            while True:
                head = b""
                while not head.endswith(b"\r\n\r\n"):
                    byte = stream.read(1)
                    if not byte:
                        break
                    head += byte
                if not head:
                    break
                lines = head.lower().split(b"\r\n")
                left = next(
                    (int(line[15:]) for line in lines if line.startswith(b"content-length:")), 0
                )
                while left:
                    left -= connection.recv_into(memoryview(room)[: min(left, len(room))])
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


def send(
    port: int,
    bodies: Sequence[bytes],
    status: int,
    stop: Event,
    sent: "multiprocessing.SimpleQueue[int]",
) -> None:
    """Send `bodies` to the completions route on `port`, one after the other, until told to stop.

    Says how many were answered, as they should.
    """
    os.nice(POLITE)
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    count = 0
    while not stop.is_set():
        body = bodies[count % len(bodies)]
        pieces = (body[start : start + PIECE] for start in range(0, len(body), PIECE))
        headers = {"Content-Type": "application/json", "Content-Length": str(len(body))}
        connection.request("POST", "/v1/completions", pieces, headers)
        response = connection.getresponse()
        answer = response.read()
        if response.status != status:
            raise RuntimeError(f"{response.status} {answer[:300]!r}")
        count += 1
    sent.put(count)


@contextlib.contextmanager
def arriving(port: int | None, bodies: Sequence[bytes], status: int = 200) -> Iterator[list[int]]:
    """Within it `bodies` are sent to `port`, if any, which is to answer `status`.

    How often stands in the list afterwards.
    """
    counts: list[int] = []
    if port is None:
        yield counts
        return
    context = multiprocessing.get_context("fork")
    stop, sent = context.Event(), context.SimpleQueue()
    process = context.Process(target=send, args=(port, bodies, status, stop, sent), daemon=True)
    process.start()
    time.sleep(0.5)
    try:
        yield counts
    finally:
        stop.set()
        process.join(300)
    if process.exitcode != 0:
        raise RuntimeError("what was sent was not answered as it should be")
    counts.append(sent.get())


class Queued:
    """How long the threads that serve small requests were ready to run and did not.

    Args:
        server: that is asked.
    """

    def __init__(self, server: Server) -> None:
        first, *others = server.every_pid()
        tasks = [(os.getpid(), os.getpid()), (first, first)]
        for pid in others:
            tasks += [(pid, int(task.name)) for task in Path(f"/proc/{pid}/task").iterdir()]
        self._files = [
            os.open(f"/proc/{pid}/task/{task}/schedstat", os.O_RDONLY) for pid, task in tasks
        ]

    def seconds(self) -> float:
        """In all so far."""
        return sum(int(os.pread(file, 100, 0).split()[1]) for file in self._files) / 1e9

    def close(self) -> None:
        """Stop counting."""
        for file in self._files:
            os.close(file)


class Small(NamedTuple):
    """One small request: seconds it took, seconds its threads were queued, seconds the bystander took after it."""

    took: float
    queued: float
    bystander: float


def _ask(
    connection: http.client.HTTPConnection, method: str, path: str, body: bytes | None = None
) -> float:
    start = time.perf_counter()
    connection.request(method, path, body, {"Content-Type": "application/json"})
    response = connection.getresponse()
    answer = response.read()
    took = time.perf_counter() - start
    if response.status != 200:
        raise RuntimeError(f"{response.status} {answer[:300]!r}")
    return took


def small_requests(server: Server, bystander: int, seconds: float) -> list[Small]:
    """Ask `server` again and again, and in between who listens on the port `bystander`."""
    body = json.dumps({"model": "m", "prompt": list(range(3, 40)), "max_tokens": 1}).encode()
    asked = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    beside = http.client.HTTPConnection("127.0.0.1", bystander, timeout=300)
    found = []
    with (
        contextlib.closing(asked),
        contextlib.closing(beside),
        contextlib.closing(Queued(server)) as queued,
    ):
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            before = queued.seconds()
            took = _ask(asked, "POST", "/v1/completions", body)
            waited = queued.seconds() - before
            time.sleep(PAUSE)
            found.append(Small(took, waited, _ask(beside, "GET", "/")))
            time.sleep(PAUSE)
    return found


@contextlib.contextmanager
def sink_at(niceness: int) -> Iterator[int]:
    """The port of a `sink`."""
    port = _serving.free_port()
    process = multiprocessing.get_context("fork").Process(
        target=sink, args=(port, niceness), daemon=True
    )
    process.start()
    try:
        yield port
    finally:
        process.kill()


class Found(NamedTuple):
    """What a server's small requests took while one thing was sent.

    Attributes:
        rounds: of each round its requests.
        num_large: how many large ones were answered meanwhile.
    """

    rounds: list[list[Small]]
    num_large: int

    @property
    def longest(self) -> float:
        """Seconds: the median of the rounds' longest."""
        return statistics.median(max(each).took for each in self.rounds)


def measure(
    servers: Sequence[Server],
    table: torch.Tensor,
    num_rows: int,
    *,
    seconds: float,
    rounds: int,
    turns: Sequence[str] = ("quiet", "ids", "sink", "loud"),
) -> dict[tuple[str, str], Found]:
    """By server and turn, what small requests take while prompts of `num_rows` arrive or do not.

    Args:
        servers: that take turns.
        table: (vocabulary, hidden).
        num_rows: of the large prompts.
        seconds: each turn takes.
        rounds: of them.
        turns: which, as described above.
    """
    with sink_at(0) as bystander, sink_at(POLITE) as sink_port:
        large = {server.name: forms_of(server, table, num_rows, stored=False) for server in servers}
        found: dict[tuple[str, str], Found] = {}
        for server in servers:
            for name in ("value", "ids"):
                server.post("/v1/completions", large[server.name][name].body)
            small_requests(server, bystander, 1.0)
        for _ in range(rounds):
            for server in servers:
                forms = large[server.name]
                sent_to = {
                    "quiet": (None, []),
                    "ids": (server.port, [forms["ids"].body]),
                    "sink": (sink_port, [forms["value"].body]),
                    "loud": (server.port, [forms["value"].body]),
                }
                for turn in turns:
                    with arriving(*sent_to[turn]) as sent:
                        small = small_requests(server, bystander, seconds)
                    before = found.get((server.name, turn), Found([], 0))
                    found[server.name, turn] = Found(
                        [*before.rounds, small], before.num_large + sum(sent)
                    )
        return found


def show(found: Mapping[tuple[str, str], Found]) -> None:
    """Print it: ms; the longest as the median of the rounds' and of all."""
    print(
        "server   while    requests  large     p50     p99  longest  queued       all   bystander: p50  longest       all"
    )
    for (server_name, turn), each in found.items():
        print(f"{server_name:8} {turn:8} {_line(each.rounds, each.num_large)}", flush=True)


def echo(model: Path, megabytes: int) -> AbstractContextManager[Server]:
    """inlay with the echo engine, as a server of that name."""
    return _renamed(
        _serving.inlay(
            model, *_serving.wide_limits(megabytes), "--engine", "echo", "--dtype", "bfloat16"
        )
    )


@contextlib.contextmanager
def _renamed(launch: AbstractContextManager[Server]) -> Iterator[Server]:
    with launch as server:
        yield replace(server, name="echo")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument(
        "--servers",
        default="echo,inlay,vllm",
        help="of these and dynamo, which takes no more than 10 MB",
    )
    options = parser.parse_args()
    names, num_rows = options.servers.split(","), _serving.rows_of(options.mb)
    with TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = _serving.wide_model(Path(directory) / "model")
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        servers = [stack.enter_context(echo(model, options.mb))] if "echo" in names else []
        others = set(names) - {"echo"}
        if others:
            servers += _serving.side_by_side(stack, model, others)
        able = [server for server in servers if _serving.takes(server.name, num_rows)]
        found = measure(able, table, num_rows, seconds=options.seconds, rounds=options.rounds)
    print(f"a small request while prompts of {options.mb} MB arrive")
    show(found)


def _line(rounds: list[list[Small]], num_large: int) -> str:
    took = sorted(small.took * 1e3 for each in rounds for small in each)
    longest = [max(each) for each in rounds]
    beside = [max(small.bystander for small in each) * 1e3 for each in rounds]
    calm = statistics.median(small.bystander * 1e3 for each in rounds for small in each)
    return (
        f"{len(took):8} {num_large:6} {statistics.median(took):7.1f} {took[int(len(took) * 0.99)]:7.1f} "
        f"{statistics.median(small.took * 1e3 for small in longest):8.1f} "
        f"{statistics.median(small.queued * 1e3 for small in longest):7.1f} {took[-1]:9.1f} "
        f"{calm:16.1f} {statistics.median(beside):8.1f} {max(beside):9.1f}"
    )


if __name__ == "__main__":
    main()
