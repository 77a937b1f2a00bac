"""What a small request waits while large prompts of embeddings arrive.

Two processes ask one server: one sends the same small prompt of ids, cached, again and again, and its times are what is
measured; the other sends the same prompt of embeddings, cached too, back to back, so that what arrives and is taken in is what
disturbs, and not the model. Each server gets its turns in rounds of four:

    quiet    nothing large is sent
    ids      the same large prompts are sent as ids: what they cost the engine
    sink     the large bodies go to a process that reads and drops them: what the machine alone does to the small request
    loud     they go to the server

    python -m benchmarks.stalls [--mb 64] [--seconds 6] [--rounds 3]
"""

import argparse
import contextlib
import http.client
import io
import json
import multiprocessing
import socket
import statistics
import time
from base64 import b64encode
from collections.abc import Iterator
from multiprocessing.synchronize import Event
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
from safetensors.torch import load_file

from benchmarks import _serving
from benchmarks._serving import Server

HIDDEN = 4096
PAUSE = 0.002
"""Seconds between one small request's answer and the next one."""


def large_requests(table: torch.Tensor, num_rows: int) -> tuple[bytes, bytes]:
    """Requests with the same prompt as rows out of `table` and as ids, in JSON."""
    ids = torch.randint(3, 500, (num_rows,), generator=torch.Generator().manual_seed(num_rows))
    file = io.BytesIO()
    torch.save(table[ids].clone(), file)
    rows = b64encode(file.getvalue()).decode()
    return (
        json.dumps({"model": "m", "max_tokens": 1, "prompt_embeds": rows}).encode(),
        json.dumps({"model": "m", "max_tokens": 1, "prompt": ids.tolist()}).encode(),
    )


def sink(port: int) -> None:
    """Answer every request on `port` once its body has been read and dropped."""
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
                left = next(int(line[15:]) for line in lines if line.startswith(b"content-length:"))
                while left:
                    left -= connection.recv_into(memoryview(room)[: min(left, len(room))])
                connection.sendall(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{}")


def send_large(port: int, body: bytes, stop: Event, sent: "multiprocessing.SimpleQueue[int]") -> None:
    """Send `body` to the completions route on `port` until told to stop; says how often."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=300)
    count = 0
    while not stop.is_set():
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        if response.status != 200:
            raise RuntimeError(f"{response.status} {answer[:300]!r}")
        count += 1
    sent.put(count)


@contextlib.contextmanager
def arriving(port: int | None, body: bytes) -> Iterator[list[int]]:
    """Within it `body` is sent to `port`, if any; how often stands in the list afterwards."""
    counts: list[int] = []
    if port is None:
        yield counts
        return
    context = multiprocessing.get_context("fork")
    stop, sent = context.Event(), context.SimpleQueue()
    process = context.Process(target=send_large, args=(port, body, stop, sent), daemon=True)
    process.start()
    time.sleep(0.5)
    try:
        yield counts
    finally:
        stop.set()
        process.join(300)
    counts.append(sent.get())


def small_times(server: Server, seconds: float) -> list[float]:
    """How long each small request took, in seconds."""
    body = json.dumps({"model": "m", "prompt": list(range(3, 40)), "max_tokens": 1}).encode()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=300)
    times = []
    end = time.perf_counter() + seconds
    while time.perf_counter() < end:
        start = time.perf_counter()
        connection.request("POST", "/v1/completions", body, {"Content-Type": "application/json"})
        response = connection.getresponse()
        answer = response.read()
        times.append(time.perf_counter() - start)
        if response.status != 200:
            raise RuntimeError(f"{response.status} {answer[:300]!r}")
        time.sleep(PAUSE)
    connection.close()
    return times


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--mb", type=int, default=64)
    parser.add_argument("--seconds", type=float, default=6.0)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with TemporaryDirectory() as directory, contextlib.ExitStack() as stack:
        model = _serving.wide_model(Path(directory) / "model", hidden=HIDDEN)
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        body, ids = large_requests(table, options.mb * (1 << 20) // (2 * HIDDEN) - 2)
        servers = [stack.enter_context(_serving.inlay(model, *_serving.wide_limits(options.mb)))]
        peer = _serving.vllm(model, *_serving.VLLM_ARGUMENTS)
        if peer is not None:
            servers.append(stack.enter_context(peer))
        drain = multiprocessing.get_context("fork").Process(
            target=sink, args=(sink_port := _serving.free_port(),), daemon=True
        )
        drain.start()
        times: dict[tuple[str, str], list[list[float]]] = {}
        counts: dict[tuple[str, str], int] = {}
        for server in servers:
            for each in (body, ids):
                server.post("/v1/completions", each)
            small_times(server, 1.0)
        for _ in range(options.rounds):
            for server in servers:
                turns = (
                    ("quiet", None, b""),
                    ("ids", server.port, ids),
                    ("sink", sink_port, body),
                    ("loud", server.port, body),
                )
                for name, port, sends in turns:
                    with arriving(port, sends) as sent:
                        times.setdefault((server.name, name), []).append(small_times(server, options.seconds))
                    counts[server.name, name] = counts.get((server.name, name), 0) + sum(sent)
        drain.kill()
    print(
        f"a small request while prompts of {options.mb} MB arrive: ms; the longest as the median of the rounds' and of all"
    )
    print("server   while    requests  large     p50     p99  longest       all")
    for (server_name, name), rounds in times.items():
        every = sorted(t * 1e3 for each in rounds for t in each)
        longest = [max(each) * 1e3 for each in rounds]
        print(
            f"{server_name:8} {name:8} {len(every):8} {counts[server_name, name]:6} {statistics.median(every):7.1f} "
            f"{every[int(len(every) * 0.99)]:7.1f} {statistics.median(longest):8.1f}  {max(longest):8.1f}"
        )


if __name__ == "__main__":
    main()
