"""What a direct connection and NATS add to the plane of one machine.

From sending a request to its first token, and CPU a token of many streams.

    python -m benchmarks.plane_latency [--rounds N]

The engine is echo, in a process of its own behind each plane; NATS' server and the worker that
bridges to it are processes too. Prints one line a case: the median and the smallest milliseconds to
the first token, and the CPU of all processes together, for a prompt of tokens and for rows of 1 MB
and 10 MB, new rows each time; then tokens a CPU-second of all processes, for 32 streams.
"""

import asyncio
import os
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import psutil
import uvloop
from pydantic import SecretStr
from tests.models import tiny
from tests.parts import Part
from tests.serving import free_port

from benchmarks._options import parser_of
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Address
from inlay.messages.digest import Secret, with_digests
from inlay.messages.prompt import Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Request, Sampling
from inlay.transport import ReceiveMemory, dial
from inlay.transport.api import Plane
from inlay.transport.local import LocalPlane
from inlay.transport.messages import FromWorker
from inlay.transport.nats.frontend import NatsPlane
from inlay.transport.nats.member import Member
from inlay.transport.nats.settings import NatsSettings
from inlay.worker import spawn

HIDDEN = 1024
CASES = {"tokens": 0, "1 MB": 1 << 20, "10 MB": 10 << 20}
STREAMS, TOKENS = 32, 2000


@asynccontextmanager
async def local(settings: EngineSettings) -> AsyncIterator[tuple[Plane, Secret, list[int]]]:
    """The plane of one machine."""
    secret = Secret.random()
    process = await spawn(settings, secret)
    plane = LocalPlane([process.channel])
    await plane.start()
    await plane.wait_ready()
    yield plane, secret, [process.pid]
    await plane.close()
    await process.close()


@asynccontextmanager
async def over_nats(settings: EngineSettings) -> AsyncIterator[tuple[Plane, Secret, list[int]]]:
    """The same engine as a worker of a fleet."""
    port = free_port()
    with tempfile.TemporaryDirectory() as store:
        server = Part("nats", "--port", port, "--store-dir", store, until="NATS at").wait_ready()
        url = f"nats://127.0.0.1:{port}"
        words = (
            settings.model.model,
            "--engine",
            "echo",
            "--served-model-name",
            "m",
            "--nats",
            url,
            "--enable-prompt-embeds",
        )
        worker = Part("worker", *words, until=" serves ").wait_ready()
        member = await Member.join(NatsSettings(nats=[SecretStr(url)]), "frontend")
        secret = await member.secret(None)
        plane = NatsPlane(member, secret)
        await plane.start()
        while not plane.workers():
            await plane.changed()
        pids = [
            child.pid
            for part in (server, worker)
            for child in (
                psutil.Process(part.process.pid),
                *psutil.Process(part.process.pid).children(recursive=True),
            )
        ]
        yield plane, secret, pids
        await plane.close()
        worker.end()
        server.end()


@asynccontextmanager
async def over_tcp(settings: EngineSettings) -> AsyncIterator[tuple[Plane, Secret, list[int]]]:
    """The same engine behind a direct connection: TCP with TLS, on this machine."""
    secret = Secret.random()
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks._tcp_worker", settings.model.model),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the worker has no pipes")
    process.stdin.write(secret.root)
    port, fingerprint = (await process.stdout.readline()).split()
    address = Address("127.0.0.1", int(port), bytes.fromhex(fingerprint.decode()))
    connection = await dial(address, secret, FromWorker, ReceiveMemory(1 << 30))
    plane = LocalPlane([connection])
    await plane.start()
    await plane.wait_ready()
    yield plane, secret, [process.pid]
    await plane.close()
    process.stdin.close()
    await process.wait()


def prompt(num_bytes: int, secret: Secret) -> Prompt:
    """A new prompt of tokens, or of so many bytes of rows."""
    if not num_bytes:
        return Prompt.of(Tokens([n % 900 for n in range(200)]))
    rows = Rows(Buffer(os.urandom(num_bytes)), "bfloat16", (num_bytes // HIDDEN // 2, HIDDEN))
    return with_digests(Prompt.of(rows), secret)


async def first_token(plane: Plane, request: Request) -> float:
    """Seconds until it has come."""
    began = time.perf_counter()
    stream = plane.workers()[0].send(request)
    async for _ in stream:
        took = time.perf_counter() - began
        stream.cancel()
    return took


def cpu_seconds(pids: list[int]) -> float:
    """Used so far by the processes `pids` and this one."""
    times = [psutil.Process(pid).cpu_times() for pid in (*pids, os.getpid())]
    return sum(each.user + each.system for each in times)


async def tokens_a_cpu_second(plane: Plane, pids: list[int]) -> float:
    """Of many streams at once."""

    async def read(number: int) -> None:
        request = Request(
            id=f"s{number}",
            prompts=(Prompt.of(Tokens([1, 2, 3])),),
            params=Sampling(max_tokens=TOKENS),
        )
        async for _ in plane.workers()[0].send(request):
            pass

    before = cpu_seconds(pids)
    await asyncio.gather(*(read(number) for number in range(STREAMS)))
    return STREAMS * TOKENS / (cpu_seconds(pids) - before)


async def measure(settings: EngineSettings, rounds: int) -> None:
    """Print all figures."""
    for name, opened in (("local", local), ("tcp", over_tcp), ("nats", over_nats)):
        async with opened(settings) as (plane, secret, pids):
            for case, num_bytes in CASES.items():
                sampling = Sampling(max_tokens=2)
                requests = [
                    Request(
                        id=f"{case}{number}", prompts=(prompt(num_bytes, secret),), params=sampling
                    )
                    for number in range(rounds)
                ]
                before = cpu_seconds(pids)
                seconds = [await first_token(plane, request) for request in requests]
                cpu = (cpu_seconds(pids) - before) / rounds
                print(
                    f"{name:6} {case:7} median {statistics.median(seconds) * 1e3:7.2f} ms, "
                    f"least {min(seconds) * 1e3:7.2f} ms, CPU {cpu * 1e3:7.2f} ms"
                )
            print(
                f"{name:6} {await tokens_a_cpu_second(plane, pids) / 1e3:.1f} thousand tokens a CPU-second"
            )


def main() -> None:
    """Run it."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as model:
        shutil.copy(tiny("llama") / "tokenizer.json", model)
        Path(model, "config.json").write_text(
            f'{{"vocab_size": 1000, "hidden_size": {HIDDEN}, "max_position_embeddings": 100000}}'
        )
        settings = EngineSettings.of(model=model, engine="echo", served_model_name=["m"])
        uvloop.run(measure(settings, rounds))


if __name__ == "__main__":
    main()
