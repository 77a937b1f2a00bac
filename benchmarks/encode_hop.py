"""What it costs to encode images in another worker.

    python -m benchmarks.encode_hop [--rounds N] [--skip-chats]

First the hop alone. Another process answers with ready rows of 1 to 40 MB, 4.5 of them as an image
of LLaVA-1.5-7B has (576 rows of 4096 in bfloat16), over a connection of one worker to another as it
is between machines (TLS); the rows are copied into memory of their own, as the cache of rows does.
The floor is the same bytes over a blocking TLS socket between the same two processes, and one
memcpy. Both take turns; the median of each and their ratio are printed.
Each process has a core of its own, as it has on a machine of its own.

Then chats about an image that no cache has: a fleet whose worker encodes itself beside one with
--language-model-only and an encode worker, with the demo's model. Milliseconds to the only token.

Tried without gain: more of a large message waited for in the reader (100 us at a time, by `select`,
`ppoll` or polling); the header of 1 MB and its first chunk in one write; OpenSSL over memory in
place of the socket; a short record taken for the end of a read; readers woken for 64 or 256 KB.
"""

import argparse
import asyncio
import base64
import os
import socket
import ssl
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import httpx
import msgspec
import numpy as np
import uvloop
from tests.models import tiny
from tests.parts import Part
from tests.serving import free_port, serving

from benchmarks._options import parser_of
from inlay import demo
from inlay.engine.echo import EchoEngine
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Address
from inlay.messages.digest import Secret
from inlay.messages.prompt import Buffer, Prompt, Tokens
from inlay.messages.request import Emit, Output, Payload, Pooling, Request, Task
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.listener import _pinned
from inlay.transport.peers import PeerConnections
from inlay.transport.tls import load_identity, make_certificate
from inlay.worker.host import EngineHost

SECRET = Secret(bytes(32))
MEGABYTES = (1, 2, 4.5, 10, 40)
HIDDEN = 1024
_SIZE = 8


class Ready(EchoEngine):
    """Answers each request with as many rows as its prompt has positions, which are there."""

    def __init__(self) -> None:
        super().__init__(EngineSettings.of(model=str(tiny("llama")), engine="echo"), SECRET)
        self._rows = Buffer(np.ones(int(max(MEGABYTES)) << 20, np.uint8).data)

    async def start(self) -> None:
        await super().start()
        # Once, as every engine: making it for each request would count for the hop.
        self._card = msgspec.structs.replace(self.card, tasks=(Task.ENCODE,))

    def submit(self, request: Request, emit: Emit) -> None:
        shape = request.prompts[0].token_ids()[0], HIDDEN
        rows = self._rows.slice(0, shape[0] * HIDDEN)
        payload = Payload("embeddings", "float8_e4m3fn", shape, rows)
        emit(Output(request.id, 0, 0, finish_reason="stop", payloads=(payload,)))


async def serve() -> None:
    """Serve both ways until standard input ends; print where."""
    _pin(1)
    identity = load_identity(make_certificate())
    engine = Ready()
    await engine.start()
    cache = EmbedsCache(0)
    host = EngineHost(engine, embeds_cache=cache)
    # Neighbours would share memory, which no floor of TLS is beside.
    endpoint = Endpoint(host, SECRET, identity, cache, neighbours=False)
    address = await endpoint.open("127.0.0.1", "127.0.0.1", 0)
    plain = socket.create_server(("127.0.0.1", 0))
    threading.Thread(target=_send, args=(plain, identity.context), daemon=True).start()
    print(address.port, plain.getsockname()[1], address.fingerprint.hex(), flush=True)
    await asyncio.to_thread(sys.stdin.read)
    await endpoint.close()


def _pin(core: int) -> None:
    """Keep this process to one core, where the system can and has two."""
    if hasattr(os, "sched_setaffinity") and core in os.sched_getaffinity(0):
        os.sched_setaffinity(0, {core})


def _send(listening: socket.socket, context: ssl.SSLContext) -> None:
    """Send as many bytes as is asked for, each time."""
    rows = np.ones(int(max(MEGABYTES)) << 20, np.uint8).data
    accepted, _ = listening.accept()
    accepted.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with context.wrap_socket(accepted, server_side=True) as connection:
        while asked := connection.recv(_SIZE):
            connection.sendall(rows[: int.from_bytes(asked, "little")])


def _receive(connection: ssl.SSLSocket, num_bytes: int) -> None:
    connection.sendall(num_bytes.to_bytes(_SIZE, "little"))
    into = np.empty(num_bytes, np.uint8)
    view, got = into.data, 0
    while got < num_bytes:
        got += connection.recv_into(view[got:])
    into.copy()


async def _asked(peers: PeerConnections, address: Address, num_bytes: int) -> None:
    prompt = Prompt.of(Tokens([num_bytes // HIDDEN]))
    request = Request(id="r", task=Task.ENCODE, prompts=(prompt,), params=Pooling())
    (payload,) = await peers.payloads(address, request)
    np.frombuffer(payload.data.view, np.uint8).copy()


def hop(rounds: int) -> None:
    """Print the cost of the hop."""
    words = [sys.executable, "-m", "benchmarks.encode_hop", "--serve"]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as other:
        if other.stdin is None or other.stdout is None:
            raise RuntimeError("the other process has no pipes")
        port, plain, fingerprint = other.stdout.readline().split()
        address = Address("127.0.0.1", int(port), bytes.fromhex(fingerprint))
        before = os.sched_getaffinity(0)
        _pin(0)
        uvloop.run(_compare(address, int(plain), rounds))
        os.sched_setaffinity(0, before)
        other.stdin.close()


async def _compare(address: Address, plain: int, rounds: int) -> None:
    peers = PeerConnections(SECRET)
    raw = socket.create_connection(("127.0.0.1", plain))
    # Else a part of its runs waits 10 ms for an acknowledgement.
    raw.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    with _pinned().wrap_socket(raw, server_hostname="inlay") as connection:
        for size in MEGABYTES:
            num_bytes = int(size * (1 << 20))
            ours, floor = [], []
            for _ in range(rounds):
                began = time.perf_counter()
                await _asked(peers, address, num_bytes)
                middle = time.perf_counter()
                _receive(connection, num_bytes)
                ours.append(middle - began)
                floor.append(time.perf_counter() - middle)
            mine, least = statistics.median(ours), statistics.median(floor)
            print(
                f"{size:4} MB: peer {1e3 * mine:6.1f} ms, TLS socket and memcpy "
                f"{1e3 * least:6.1f} ms: {mine / least:.2f}x; least "
                f"{1e3 * min(ours):.1f} and {1e3 * min(floor):.1f} ms"
            )
    await peers.close()


def _chat(client: httpx.Client, url: str, salt: str, image: str) -> float:
    content = [
        {"type": "image_url", "image_url": {"url": image}},
        {"type": "text", "text": "What digit is it?"},
    ]
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": content}],
        "max_tokens": 1,
        "cache_salt": salt,
    }
    began = time.perf_counter()
    client.post(url + "/v1/chat/completions", json=body).raise_for_status()
    return time.perf_counter() - began


def chats(rounds: int) -> None:
    """Print the time of chats about images, encoder apart and together."""
    path = Path(demo.vision_examples().pictures[0].path)
    image = "data:image/png;base64," + base64.b64encode(path.read_bytes()).decode()
    ways = {"together": [["--task", "generate"]], "apart": [["--language-model-only"]]}
    ways["apart"].append(["--task", "encode"])
    with ExitStack() as stack:
        store = stack.enter_context(tempfile.TemporaryDirectory())
        client = stack.enter_context(httpx.Client(timeout=60, trust_env=False))
        port = free_port()
        nats = Part("nats", "--port", port, "--store-dir", store, until="NATS at nats://")
        stack.callback(nats.end)
        nats.wait_ready()
        url = f"nats://127.0.0.1:{port}"
        ask: dict[str, Callable[[str], float]] = {}
        for way, workers in ways.items():
            fleet: list[Any] = ["--nats", url, "--namespace", way]
            for words in workers:
                model: list[Any] = [demo.vision_dir(), "--served-model-name", "m"]
                part = Part("worker", *model, *fleet, *words, until=" serves ")
                stack.callback(part.end)
                part.wait_ready()
            server = stack.enter_context(serving(*fleet, command="frontend"))
            ask[way] = lambda salt, at=server.url: _chat(client, at, salt, image)  # type: ignore[misc]
        times: dict[str, list[float]] = {
            f"{way}, {what}": [] for way in ways for what in ("new", "cached")
        }
        for number in range(rounds + 3):
            for way in ways:
                for what in ("new", "cached"):
                    took = ask[way](str(number))
                    if number >= 3:
                        times[f"{way}, {what}"].append(took)
        for name, some in times.items():
            print(f"{name:17} {1e3 * statistics.median(some):6.1f} ms, least {1e3 * min(some):.1f}")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--serve", action="store_true", help=argparse.SUPPRESS)
    parser.add_argument("--skip-chats", action="store_true")
    given = parser.parse_args()
    if given.serve:
        uvloop.run(serve())
        return
    hop(given.rounds)
    if not given.skip_chats:
        chats(given.rounds)


if __name__ == "__main__":
    main()
