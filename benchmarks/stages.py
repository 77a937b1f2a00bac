"""What a stage of a pipeline costs beside its work, and what is left of requests that are aborted.

    python -m benchmarks.stages [--rounds N] [--aborted N]

Stages that do nothing are processes of their own; each gives a payload of 4 KB or 1 MB. A request
goes through one, two and three of them; the time that a further stage adds is printed for the ways
payloads can go: through the frontend over Unix sockets and shared memory, as `inlay serve` has it;
and from worker to worker as in a fleet, as neighbours of one machine and over TCP with TLS. Ways and
lengths take turns; medians, and the processor time of the workers.

Then requests through three stages over TCP, most of which are aborted at a random moment. Printed
are the payloads and bytes that the workers still keep 5 s later, and their resident memory before
and after.
"""

import argparse
import asyncio
import os
import random
import socket
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import aclosing
from itertools import count

import psutil
import uvloop

from benchmarks._options import parser_of
from inlay.base.address import Address
from inlay.base.errors import InlayError
from inlay.messages.card import Limits, ModelCard, Stats
from inlay.messages.commands import ReadStats
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.messages.request import Emit, Input, Output, Payload, Request, Task
from inlay.router import Router
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.link import PeerLink
from inlay.transport.listener import dial
from inlay.transport.local import Arena, LocalPlane, LocalTransport
from inlay.transport.memory import ReceiveMemory
from inlay.transport.messages import FromWorker, ToWorker
from inlay.transport.peers import PeerConnections
from inlay.transport.serve import serve
from inlay.transport.tls import load_identity, make_certificate
from inlay.worker.host import EngineHost
from inlay_stages.params import Diffusion
from inlay_stages.stage_result import StageResult
from inlay_stages.walk import Edge, Step, admitted, walk

SECRET = Secret(bytes(32))
LENGTHS = (1, 2, 3)
SIZES = {"4 KB": 1 << 12, "1 MB": 1 << 20}
ARENA_BYTES = 64 << 20


class Idle:
    """`inlay.engine.api.Engine` that gives a payload which is there.

    It is as large as `Diffusion.width` says, after so many milliseconds as `Diffusion.steps`.
    """

    def __init__(self, name: str) -> None:
        self._name = name
        self._data = Buffer(os.urandom(max(SIZES.values())))
        self._running: dict[str, tuple[asyncio.TimerHandle, Request, Emit]] = {}

    @property
    def card(self) -> ModelCard:
        """Of a stage."""
        return ModelCard(
            name=self._name,
            path="",
            weights_id=self._name,
            dtype="float32",
            vocab_size=0,
            hidden_size=0,
            limits=Limits(max_model_len=1, max_num_seqs=64),
            engine="idle",
            engine_version="1",
            tasks=(Task.STAGE,),
        )

    async def start(self) -> None:
        """Do nothing."""

    async def close(self) -> None:
        """Do nothing."""

    def submit(self, request: Request, emit: Emit) -> None:
        """Emit the payload, at once or a while later."""
        params = request.params
        if not isinstance(params, Diffusion):
            raise TypeError("not a request of a stage")
        if params.steps:
            loop = asyncio.get_running_loop()
            timer = loop.call_later(1e-3 * params.steps, self._end, request.id)
            self._running[request.id] = timer, request, emit
        else:
            emit(self._output(request, params.width))

    def _end(self, request_id: str) -> None:
        _, request, emit = self._running.pop(request_id)
        if isinstance(request.params, Diffusion):
            emit(self._output(request, request.params.width))

    def _output(self, request: Request, size: int) -> Output:
        payload = Payload("out", "uint8", (size,), self._data.slice(0, size))
        return Output(request.id, request.attempt, 0, finish_reason="stop", payloads=(payload,))

    def abort(self, request_id: str) -> None:
        """End a request."""
        if request_id in self._running:
            timer, request, emit = self._running.pop(request_id)
            timer.cancel()
            emit(request.end("abort"))

    async def probe(self) -> float:
        """Return no time."""
        return 0.0

    def stats(self) -> Stats:
        """Return what runs."""
        return Stats(running=len(self._running))


async def work(name: str, way: str, *fds: int) -> None:
    """Serve until standard input ends; print where."""
    peers = PeerConnections(SECRET)
    host = EngineHost(Idle(name), peers=peers)
    if way == "socket":
        arena = Arena(ARENA_BYTES, fds[1])
        channel: LocalTransport[ToWorker] = await LocalTransport.open(
            socket.socket(fileno=fds[0]), arena, ToWorker, sends_shared=False
        )
        await serve(channel, host)
        return
    identity = load_identity(make_certificate())
    endpoint = Endpoint(host, SECRET, identity, EmbedsCache(0), neighbours=way == "neighbours")
    address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
    host.connects(address)
    print(address.port, address.fingerprint.hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await endpoint.close()
    await peers.close()


def _started(name: str, way: str, *fds: int) -> "subprocess.Popen[str]":
    return subprocess.Popen(
        [sys.executable, "-m", "benchmarks.stages", "--serve", name, way, *map(str, fds)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        pass_fds=fds,
    )


class Stages:
    """Three stages, and a router to them.

    Attributes:
        processes: of the workers.
        links: to them.
        router: over these.
    """

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []
        self.links: list[PeerLink] = []
        self._ids = count()

    @classmethod
    async def started(cls, way: str) -> "Stages":
        """Start them: `way` is "socket", "neighbours" or "tcp"."""
        stages = cls()
        plane = LocalPlane()
        memory = ReceiveMemory(1 << 30)
        for number in LENGTHS:
            name = f"stage-{number}"
            if way == "socket":
                ours, theirs = socket.socketpair()
                arena = Arena(ARENA_BYTES)
                stages.processes.append(_started(name, way, theirs.fileno(), arena.fd))
                theirs.close()
                channel = await LocalTransport[FromWorker].open(
                    ours, arena, FromWorker, sends_shared=True
                )
                stages.links.append(plane.add(channel))
            else:
                stages.processes.append(_started(name, way))
                said = stages.processes[-1].stdout
                if said is None:
                    raise RuntimeError("the worker has no pipe")
                # Links live by what this loop sends meanwhile.
                port, digest = (await asyncio.to_thread(said.readline)).split()
                address = Address("127.0.0.1", int(port), bytes.fromhex(digest))
                connection = await dial(address, SECRET, FromWorker, memory)
                stages.links.append(plane.add(connection))
        for link in stages.links:
            await link.wait_ready()
        stages.router = Router(plane)
        await stages.router.start()
        stages._plane = plane
        return stages

    router: Router
    _plane: LocalPlane

    async def ask(self, length: int, size: int, milliseconds: int = 0) -> int:
        """Return the bytes that a request through so many stages gives."""
        number = next(self._ids)

        def make(name: str, inputs: tuple[Input, ...]) -> Request:
            params = Diffusion(width=size, height=1, steps=milliseconds)
            id_ = f"{number}-{name}"
            return Request(id=id_, task=Task.STAGE, prompts=(), params=params, inputs=inputs)

        steps = []
        before: tuple[str | None, str] = None, "prompt"
        for one in range(1, length + 1):
            name = f"stage-{one}"
            steps.append(Step(name, (Edge(before[0], ((before[1], "in"),)),), one == length))
            before = name, "out"
        prompt = Payload("prompt", "uint8", (5,), Buffer(b"hello"))
        got = 0
        with admitted(self.router, steps, None):
            async with aclosing(
                walk(self.router, steps, {None: StageResult([prompt])}, make, lambda _: None)
            ) as outputs:
                async for output in outputs:
                    got += sum(len(payload.data) for payload in output.payloads)
        return got

    def cpu(self) -> float:
        """Return the CPU seconds of the workers and of this process."""
        workers = (psutil.Process(process.pid).cpu_times() for process in self.processes)
        return time.process_time() + sum(each.user + each.system for each in workers)

    async def close(self) -> None:
        """End all."""
        await self.router.close()
        await self._plane.close()
        for process in self.processes:
            process.communicate()


async def overhead(rounds: int) -> None:
    """Print the time that a further stage adds."""
    ways = {
        "through the frontend, one machine": await Stages.started("socket"),
        "worker to worker, neighbours": await Stages.started("neighbours"),
        "worker to worker, TCP with TLS": await Stages.started("tcp"),
    }
    for label, size in SIZES.items():
        took: dict[tuple[str, int], list[float]] = {}
        used: dict[tuple[str, int], float] = {}
        for number in range(rounds + 20):
            for way, stages in ways.items():
                for length in LENGTHS:
                    began, cpu = time.perf_counter(), stages.cpu()
                    if await stages.ask(length, size) != size:
                        raise RuntimeError("the answer is not whole")
                    if number >= 20:
                        took.setdefault((way, length), []).append(time.perf_counter() - began)
                        used[way, length] = used.get((way, length), 0.0) + stages.cpu() - cpu
        for way in ways:
            whole = [1e3 * statistics.median(took[way, length]) for length in LENGTHS]
            added = (whole[-1] - whole[0]) / (len(LENGTHS) - 1)
            least = [1e3 * min(took[way, length]) for length in LENGTHS]
            cpu = 1e3 * (used[way, 3] - used[way, 1]) / (len(LENGTHS) - 1) / rounds
            print(
                f"{label} {way:34} 1, 2, 3 stages {_shown(whole)} ms; a stage adds {added:.2f} ms "
                f"(least {(least[-1] - least[0]) / (len(LENGTHS) - 1):.2f}), {cpu:.2f} ms of CPU"
            )
    for stages in ways.values():
        await stages.close()


def _shown(numbers: Sequence[float]) -> str:
    return ", ".join(f"{number:.2f}" for number in numbers)


async def aborted(number: int) -> None:
    """Print what is left of requests that were aborted."""
    stages = await Stages.started("tcp")
    chance = random.Random(1)
    size = SIZES["1 MB"]

    async def one(gate: asyncio.Semaphore) -> str:
        async with gate:
            try:
                async with asyncio.timeout(chance.uniform(0, 0.6)):
                    await stages.ask(3, size, 2)
            except TimeoutError:
                return "aborted"
            except InlayError as error:
                return type(error).__name__
            return "answered"

    async def some(count_: int) -> dict[str, int]:
        gate = asyncio.Semaphore(16)
        ends = await asyncio.gather(*(one(gate) for _ in range(count_)))
        return {end: ends.count(end) for end in sorted(set(ends))}

    await some(100)
    before = [psutil.Process(process.pid).memory_info().rss for process in stages.processes]
    found = await some(number)
    await asyncio.sleep(5)
    left = [await link.call(ReadStats()) for link in stages.links]
    after = [psutil.Process(process.pid).memory_info().rss for process in stages.processes]
    print(f"{number} requests: {', '.join(f'{count_} {end}' for end, count_ in found.items())}")
    print(
        f"5 s later: {sum(one.held_payloads for one in left)} payloads, "
        f"{sum(one.held_bytes for one in left)} bytes, {sum(one.running for one in left)} running"
    )
    print(
        "resident MB before and after: "
        + ", ".join(f"{a / 1e6:.0f} -> {b / 1e6:.0f}" for a, b in zip(before, after, strict=True))
    )
    await stages.close()


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=300)
    parser.add_argument("--aborted", type=int, default=1000)
    parser.add_argument("--serve", nargs="+", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        name, way, *fds = given.serve
        uvloop.run(work(name, way, *map(int, fds)))
        return
    uvloop.run(overhead(given.rounds))
    uvloop.run(aborted(given.aborted))


if __name__ == "__main__":
    main()
