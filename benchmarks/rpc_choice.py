"""Own frames beside gRPC (aio) and ZeroMQ for what workers and frontends send each other.

Two processes on one machine over plain TCP, the same messages for all (`inlay.transport.frames`):
tokens of 32 streams, a message each; 10 MB by value; and a payload of 64 MB beside a stream that
has a token every millisecond. CPU is of both processes. Own frames run over TLS as well, which is
how they are used.

    pip install grpcio pyzmq
    python -m benchmarks.rpc_choice [--rounds N]
"""

import argparse
import asyncio
import os
import statistics
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from importlib import import_module
from importlib.util import find_spec
from typing import Any, Protocol, TypeAlias

import msgspec
import psutil
import uvloop

from benchmarks._options import parser_of
from inlay.messages.card import Address
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer
from inlay.transport import ReceiveMemory, dial, frames
from inlay.transport.listener import Listener
from inlay.transport.tls import load_identity, make_certificate

STREAMS, TOKENS = 32, 2000
PACED, PACE = 2000, 0.001
SECRET = Secret(bytes(32))
MIB = 1 << 20


class Run(msgspec.Struct, tag="run", array_like=True):
    """Ask for so many tokens of stream `stream`, one every `pace` seconds; 0: as fast as can be."""

    stream: int
    tokens: int
    pace: float = 0.0


class Fetch(msgspec.Struct, tag="fetch", array_like=True):
    """Ask for so many bytes."""

    num_bytes: int


class Blob(msgspec.Struct, tag="blob", array_like=True):
    """Bytes, or their receipt."""

    data: Buffer


class Token(msgspec.Struct, tag="token", array_like=True):
    """A token of a stream."""

    stream: int
    index: int
    ids: tuple[int, ...]


Sent: TypeAlias = Run | Fetch | Blob | Token
Dialer: TypeAlias = "Callable[[int, str], AbstractAsyncContextManager[Carrier]]"


class Carrier(Protocol):
    """One end of a connection."""

    def send(self, message: Sent) -> None:
        """Send without waiting."""

    async def receive(self) -> Sent:
        """Return the next message."""


class Own:
    """Frames of `inlay.transport`."""

    def __init__(self, connection: Any) -> None:
        self._connection = connection

    def send(self, message: Sent) -> None:
        self._connection.send(message)

    async def receive(self) -> Sent:
        return await self._connection.receive()  # type: ignore[no-any-return]


class Queued:
    """Messages as lists of bytes, over queues that a library's tasks serve."""

    def __init__(self) -> None:
        self.out: asyncio.Queue[list[Any]] = asyncio.Queue()
        self.arrived: asyncio.Queue[list[Any]] = asyncio.Queue()
        self._decoder = frames.Decoder[Sent](Sent)

    def send(self, message: Sent) -> None:
        header, buffers = frames.encode(message)
        self.out.put_nowait([header, *(each.view for each in buffers)])

    async def receive(self) -> Sent:
        header, *buffers = await self.arrived.get()
        return self._decoder.decode(header, [Buffer(each) for each in buffers])


async def answer(carrier: Carrier) -> None:
    """Do what the client asks, as a worker would."""
    tasks = set()
    while True:
        try:
            message = await carrier.receive()
        except EOFError:
            return
        match message:
            case Run(stream, tokens, pace):
                task = asyncio.create_task(_emit(carrier, stream, tokens, pace))
                tasks.add(task)
                task.add_done_callback(tasks.discard)
            case Fetch(num_bytes):
                carrier.send(Blob(Buffer(bytes(num_bytes))))
            case Blob():
                del message
                carrier.send(Blob(Buffer(b"")))


async def _emit(carrier: Carrier, stream: int, tokens: int, pace: float) -> None:
    for index in range(tokens):
        carrier.send(Token(stream, index, (index,)))
        await asyncio.sleep(pace)


# Own frames.


async def serve_own(tls: bool) -> None:
    """Listen, print the port and the fingerprint, and answer."""
    identity = load_identity(make_certificate()) if tls else None
    listener = Listener(
        SECRET,
        Sent,
        ReceiveMemory(1 << 30),
        lambda connection: tasks.append(asyncio.create_task(answer(Own(connection)))),
        tls=None if identity is None else identity.context,
        fingerprint=b"" if identity is None else identity.fingerprint,
    )
    tasks: list[asyncio.Task[None]] = []
    port = await listener.listen("127.0.0.1", 0)
    print(port, "" if identity is None else identity.fingerprint.hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)


@asynccontextmanager
async def dial_own(port: int, fingerprint: str) -> AsyncIterator[Carrier]:
    """Connect."""
    address = Address("127.0.0.1", port, bytes.fromhex(fingerprint))
    connection = await dial(address, SECRET, Sent, ReceiveMemory(1 << 30))
    yield Own(connection)
    connection.close()


# gRPC: a stream a request would be its usual form; one stream for all is cheaper, and is what runs
# here, with a second one for large payloads, so that flow control keeps the two apart.

_LIMITS = [("grpc.max_receive_message_length", 1 << 30), ("grpc.max_send_message_length", 1 << 30)]


def _joined(parts: list[Any]) -> bytes:
    return msgspec.msgpack.encode(parts)


def _split(data: bytes) -> list[Any]:
    return msgspec.msgpack.decode(data, type=list[memoryview])


async def serve_grpc() -> None:
    """Listen, print the port, and answer."""
    grpc: Any = import_module("grpc")
    carrier = Queued()
    large: asyncio.Queue[list[Any]] = asyncio.Queue()

    async def small_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        reading = asyncio.create_task(_read_all(requests, carrier))
        try:
            while True:
                parts = await carrier.out.get()
                if sum(map(len, parts)) > MIB:
                    large.put_nowait(parts)
                else:
                    yield _joined(parts)
        finally:
            reading.cancel()

    async def large_stream(requests: AsyncIterator[bytes], context: Any) -> AsyncIterator[bytes]:
        while True:
            yield _joined(await large.get())

    handler = grpc.method_handlers_generic_handler(
        "bench",
        {
            "small": grpc.stream_stream_rpc_method_handler(small_stream),
            "large": grpc.stream_stream_rpc_method_handler(large_stream),
        },
    )
    server = grpc.aio.server(options=_LIMITS)
    server.add_generic_rpc_handlers((handler,))
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    answering = asyncio.create_task(answer(carrier))
    print(port, "", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    answering.cancel()


async def _read_all(stream: Any, carrier: Queued) -> None:
    async for data in stream:
        carrier.arrived.put_nowait(_split(data))


@asynccontextmanager
async def dial_grpc(port: int, _: str) -> AsyncIterator[Carrier]:
    """Connect."""
    grpc: Any = import_module("grpc")
    carrier = Queued()

    async def sent() -> AsyncIterator[bytes]:
        while True:
            yield _joined(await carrier.out.get())

    async def nothing() -> AsyncIterator[bytes]:
        await asyncio.Event().wait()
        yield b""

    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}", options=_LIMITS) as channel:
        calls = [
            channel.stream_stream("/bench/small")(sent()),
            channel.stream_stream("/bench/large")(nothing()),
        ]
        tasks = [asyncio.create_task(_read_all(call, carrier)) for call in calls]
        yield carrier
        for task in tasks:
            task.cancel()
        for call in calls:
            call.cancel()


# ZeroMQ: a pair of sockets, which keeps order and has no streams.


async def _pump(carrier: Queued, link: Any) -> None:
    async def write() -> None:
        while True:
            await link.send_multipart(await carrier.out.get(), copy=False)

    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(write())
        while True:
            parts = await link.recv_multipart(copy=False)
            carrier.arrived.put_nowait([part.buffer for part in parts])


async def serve_zeromq() -> None:
    """Listen, print the port, and answer."""
    zmq: Any = import_module("zmq")
    contexts: Any = import_module("zmq.asyncio")
    carrier = Queued()
    link = contexts.Context().socket(zmq.PAIR)
    link.set_hwm(0)
    port = link.bind_to_random_port("tcp://127.0.0.1")
    tasks = [asyncio.create_task(_pump(carrier, link)), asyncio.create_task(answer(carrier))]
    print(port, "", flush=True)
    await asyncio.to_thread(sys.stdin.read)
    os._exit(0 if len(tasks) == 2 else 1)


@asynccontextmanager
async def dial_zeromq(port: int, _: str) -> AsyncIterator[Carrier]:
    """Connect."""
    zmq: Any = import_module("zmq")
    contexts: Any = import_module("zmq.asyncio")
    carrier = Queued()
    context = contexts.Context()
    link = context.socket(zmq.PAIR)
    link.set_hwm(0)
    link.connect(f"tcp://127.0.0.1:{port}")
    pumping = asyncio.create_task(_pump(carrier, link))
    yield carrier
    pumping.cancel()
    link.close(0)


CARRIERS: dict[str, tuple[Callable[[], Awaitable[None]], Dialer]] = {
    "own frames": (lambda: serve_own(False), dial_own),
    "own frames, TLS": (lambda: serve_own(True), dial_own),
    "gRPC": (serve_grpc, dial_grpc),
    "ZeroMQ": (serve_zeromq, dial_zeromq),
}


async def measure(name: str, rounds: int) -> None:
    """Print the three cases of one carrier."""
    process = await asyncio.create_subprocess_exec(
        *(sys.executable, "-m", "benchmarks.rpc_choice", "--serve", name),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
    )
    if process.stdin is None or process.stdout is None:
        raise RuntimeError("the server has no pipes")
    port, _, fingerprint = (await process.stdout.readline()).decode().strip().partition(" ")

    def cpu() -> float:
        times = [psutil.Process(pid).cpu_times() for pid in (process.pid, os.getpid())]
        return sum(each.user + each.system for each in times)

    async with CARRIERS[name][1](int(port), fingerprint) as carrier:
        before = cpu()
        for stream in range(STREAMS):
            carrier.send(Run(stream, TOKENS))
        for _ in range(STREAMS * TOKENS):
            await carrier.receive()
        tokens = STREAMS * TOKENS / (cpu() - before)
        payload = os.urandom(10 * MIB)
        seconds = []
        before = cpu()
        for _ in range(rounds):
            began = time.perf_counter()
            carrier.send(Blob(Buffer(payload)))
            await carrier.receive()
            seconds.append(time.perf_counter() - began)
        by_value = (cpu() - before) / rounds
        carrier.send(Run(0, PACED, PACE))
        gaps = []
        last = time.perf_counter()
        seen = 0
        while seen < PACED:
            message = await carrier.receive()
            now = time.perf_counter()
            if isinstance(message, Token):
                gaps.append(now - last)
                last = now
                seen += 1
                if seen in (PACED // 4, PACED // 2):
                    carrier.send(Fetch(64 * MIB))
    process.stdin.close()
    await process.wait()
    print(
        f"{name:16} {tokens / 1e3:6.0f} thousand tokens a CPU-second; 10 MB "
        f"{statistics.median(seconds) * 1e3:5.1f} ms, CPU {by_value * 1e3:5.1f} ms; longest gap "
        f"beside 64 MB {max(gaps[10:]) * 1e3:5.1f} ms",
        flush=True,
    )


async def _serve(name: str) -> None:
    await CARRIERS[name][0]()


def main() -> None:
    """Run it."""
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--serve", choices=CARRIERS, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.serve:
        uvloop.run(_serve(given.serve))
        return
    for name, library in zip(CARRIERS, ("uvloop", "uvloop", "grpc", "zmq"), strict=True):
        if find_spec(library) is None:
            print(f"{name:16} not installed")
        else:
            uvloop.run(measure(name, given.rounds))


if __name__ == "__main__":
    main()
