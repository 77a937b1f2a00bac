"""Streamed tokens per CPU-second of the frontend: many small streams.

Three ways. *Floor*: a bare ASGI app that sends events made beforehand, at the paced rate: what
server and system cost. *Paced*: one token for every stream at each tick of a clock in the
frontend's own process, slow enough for it to keep up, so that every token is an event and a write
of its own; no transport but its queue. *Echo*: a worker process with the echo engine, as fast as it
comes, over the local plane; tokens that wait together share an event. The load comes from this
process. Figures are CPU-seconds from the system's own accounts, so that a busy machine does not
blur them.

    python -m benchmarks.frontend_streams [--connections 32] [--tokens 128] [--rounds 12]

The kernel has 9 us of an event, one write to a connection. Tried without gain: events written past
uvloop (`os.write`, 4.1 us against 4.4); the single choice of a request awaited in its own task.
"""

import argparse
import asyncio
import json
import subprocess
import sys
import time
from collections.abc import AsyncIterator, Sequence
from typing import Never

import psutil
import uvicorn
import uvloop
from tests.models import tiny

from benchmarks import http_choice
from benchmarks._options import parser_of
from inlay.api import build_app
from inlay.base.errors import InvalidRequestError
from inlay.base.pace import freeze_gc
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.http import FrontendSettings
from inlay.http.serve import serve as serve_http
from inlay.messages.card import ModelCard
from inlay.messages.commands import WorkerCommand
from inlay.messages.digest import Secret
from inlay.messages.request import (
    EngineUsage,
    FinishReason,
    Output,
    Request,
)
from inlay.router import Router
from inlay.transport.local import LocalPlane
from inlay.transport.output_queue import DispatchQueue, OutputQueue
from inlay.worker import spawn

BODIES: dict[str, tuple[str, dict[str, object]]] = {
    "completions": ("/v1/completions", {"prompt": "the harbour town counts its lanterns " * 4}),
    "completions, a stop string": (
        "/v1/completions",
        {"prompt": "the harbour town counts its lanterns " * 4, "stop": ["never said"]},
    ),
    "chat": (
        "/v1/chat/completions",
        {"messages": [{"role": "user", "content": "count the lanterns " * 8}]},
    ),
}


TICK = 0.008


class PacedWorker:
    """A worker and its plane in one: an output of one token to every stream at each tick."""

    id = "paced"

    def __init__(self, card: ModelCard) -> None:
        self.card = card
        self._streams: set[PacedStream] = set()
        self._clock: asyncio.Task[None] | None = None
        self._deliveries = DispatchQueue()

    def workers(self) -> "list[PacedWorker]":
        return [self]

    def send(self, request: Request) -> "PacedStream":
        if self._clock is None:
            self._clock = asyncio.create_task(self._run())
        return PacedStream(request, self._streams, self._deliveries)

    async def _run(self) -> None:
        while True:
            await asyncio.sleep(TICK)
            for stream in list(self._streams):
                stream.step()

    async def start(self) -> None: ...

    async def close(self) -> None: ...

    def unavailable(self) -> dict[str, str]:
        return {}

    async def changed(self) -> None: ...

    def room(self, num_bytes: int) -> memoryview | None:
        return None

    async def call(self, command: WorkerCommand[object], within: float = 30.0) -> Never:
        raise InvalidRequestError("a paced worker follows no commands")


class PacedStream:
    def __init__(
        self, request: Request, open_: "set[PacedStream]", deliveries: DispatchQueue
    ) -> None:
        self._work = request
        self._open = open_
        self._ids = request.prompt.token_ids()
        self._sent = 0
        self._queue = OutputQueue(deliveries)
        open_.add(self)

    def step(self) -> None:
        self._sent += 1
        last = self._sent == self._work.sampling.max_tokens
        usage = EngineUsage(len(self._ids), self._sent) if last or self._sent == 1 else None
        id_ = self._ids[self._sent % len(self._ids)]
        reason: FinishReason | None = "length" if last else None
        self._queue.put(
            Output(self._work.id, 0, self._sent - 1, (id_,), finish_reason=reason, usage=usage)
        )
        if last:
            self._open.discard(self)

    def __aiter__(self) -> AsyncIterator[Sequence[Output]]:
        return aiter(self._queue)

    def cancel(self) -> None:
        self._open.discard(self)


def serve(how: str, directory: str, port: int, tokens: int) -> None:
    settings = EngineSettings.of(model=directory, served_model_name=["m"], engine="echo")
    secret = Secret.random()
    frontend = FrontendSettings(port=port)

    async def echo() -> None:
        process = await spawn(settings, secret)
        plane = LocalPlane([process.channel])
        await plane.start()
        await plane.wait_ready()
        await serve_http(build_app(Router(plane), frontend, secret=secret), frontend)
        await plane.close()
        await process.close()

    async def paced() -> None:
        engine = EchoEngine(settings, secret)
        await engine.start()
        router = Router(PacedWorker(engine.card))
        await serve_http(build_app(router, frontend, secret=secret), frontend)

    async def floor() -> None:
        http_choice.TICK, http_choice.TOKENS = TICK, tokens
        config = uvicorn.Config(
            http_choice.raw_app, port=port, log_level="warning", access_log=False
        )
        await uvicorn.Server(config).serve()

    # As the commands do before they serve.
    freeze_gc()
    uvloop.run({"floor": floor, "echo": echo, "paced": paced}[how]())


async def exchange(port: int, path: str, body: bytes) -> bytes:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    head = f"POST {path} HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(body) + body)
    data = await reader.read(-1)
    writer.close()
    return data


def seconds(process: psutil.Process) -> float:
    times = process.cpu_times()
    return float(times.user + times.system)


async def wait_ready(port: int) -> None:
    for _ in range(300):
        try:
            _, writer = await asyncio.open_connection("127.0.0.1", port)
        except OSError:
            await asyncio.sleep(0.1)
            continue
        writer.close()
        return
    raise RuntimeError("the server did not come up")


async def drive(
    how: str, frontend: psutil.Process, port: int, arguments: argparse.Namespace
) -> None:
    workers = frontend.children()
    for name, (path, fields) in BODIES.items():
        body = json.dumps(
            {
                **fields,
                "max_tokens": arguments.tokens,
                "stream": True,
                "ignore_eos": True,
                "temperature": 0,
            }
        ).encode()
        await exchange(port, path, body)
        before, before_worker, began = (
            seconds(frontend),
            sum(map(seconds, workers)),
            time.perf_counter(),
        )
        events = 0
        for _ in range(arguments.rounds):
            answers = await asyncio.gather(
                *(exchange(port, path, body) for _ in range(arguments.connections))
            )
            events += sum(answer.count(b"data: ") - 1 for answer in answers)
        wall = time.perf_counter() - began
        cpu = seconds(frontend) - before
        both = cpu + sum(map(seconds, workers)) - before_worker
        tokens = arguments.rounds * arguments.connections * arguments.tokens
        print(
            f"{how:6} {name:28} {tokens / cpu:16.0f} {tokens / both:12.0f} {tokens / wall:10.0f} {tokens / events:13.2f}"
        )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--serve")
    parser.add_argument("--how", default="echo")
    parser.add_argument("--port", type=int, default=8231)
    parser.add_argument("--connections", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=12)
    arguments = parser.parse_args()
    if arguments.serve:
        serve(arguments.how, arguments.serve, arguments.port, arguments.tokens)
        return
    directory = str(tiny("llama"))
    print(
        f"{'':35} {'tokens/CPU-s':>16} {'with worker':>12} {'tokens/s':>10} {'tokens/event':>13}",
        flush=True,
    )
    for offset, how in enumerate(("floor", "paced", "echo")):
        port = arguments.port + offset
        command = [
            sys.executable,
            "-m",
            "benchmarks.frontend_streams",
            "--port",
            str(port),
            "--how",
            how,
        ]
        command += ["--tokens", str(arguments.tokens)]
        process = subprocess.Popen([*command, "--serve", directory])
        try:
            asyncio.run(wait_ready(port))
            asyncio.run(drive(how, psutil.Process(process.pid), port, arguments))
        finally:
            process.terminate()
            process.wait()


if __name__ == "__main__":
    main()
