"""vLLM's own server beside inlay and Dynamo in front of vLLM.

One model, one kind of engine and settings, so what differs is the way to it.

All servers run at once and take turns. For text: time to the first token and tokens a second, of
one stream and of many at once, and CPU seconds a request of all processes. For embeddings: what a
cached prompt costs over the same as ids (`benchmarks.cached_prompt`).

    BENCH_VLLM=/path/to/python [BENCH_DYNAMO=/path/to/python] python -m benchmarks.vllm_front
    [--rounds N]

Dynamo has a vLLM of its own, of the version that it is made for.
"""

import asyncio
import json
import os
import statistics
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from benchmarks import _serving
from benchmarks._options import parser_of
from benchmarks._serving import Server
from benchmarks.cached_prompt import SIZES, measure

PROMPT_WORDS, OUTPUT_TOKENS, MANY = 60, 64, 16
WORDS = (
    "harbour",
    "town",
    "counts",
    "its",
    "lanterns",
    "every",
    "night",
    "writes",
    "number",
    "book",
    "island",
)
CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Turn:
    """Some streams at once.

    Attributes:
        first: median seconds to a stream's first token.
        rate: tokens a second, of all together, from the first token of the first on.
        cpu: CPU seconds a request, of the server's processes.
    """

    first: float
    rate: float
    cpu: float


def body(number: int) -> bytes:
    """A request for a stream, with a prompt that is new each time."""
    words = [
        WORDS[(number * 7919 + place * (place + number)) % len(WORDS)]
        for place in range(PROMPT_WORDS)
    ]
    fields = {"model": "m", "prompt": f"{number}: " + " ".join(words), "max_tokens": OUTPUT_TOKENS}
    return json.dumps({**fields, "temperature": 0, "ignore_eos": True, "stream": True}).encode()


async def streamed(server: Server, request: bytes) -> tuple[float, float]:
    """When its first event came, and its last."""
    reader, writer = await asyncio.open_connection("127.0.0.1", server.port)
    head = "POST /v1/completions HTTP/1.1\r\nhost: x\r\nconnection: close\r\ncontent-type: application/json\r\n"
    writer.write(head.encode() + b"content-length: %d\r\n\r\n" % len(request) + request)
    first = last = 0.0
    text = b""
    while data := await reader.read(65536):
        if b"data: {" in data:
            last = time.perf_counter()
            first = first or last
        text += data
    writer.close()
    if b" 200 OK" not in text[:20] or b'"length"' not in text:
        raise RuntimeError(f"{server.name}: {text[-500:]!r}")
    return first, last


async def turn(server: Server, many: int, number: int) -> Turn:
    """So many streams at once."""
    requests = [body(number * many + each) for each in range(many)]
    cpu, start = server.cpu_seconds(), time.perf_counter()
    times = await asyncio.gather(*(streamed(server, request) for request in requests))
    first = min(first for first, _ in times)
    return Turn(
        statistics.median(first - start for first, _ in times),
        many * (OUTPUT_TOKENS - 1) / (max(last for _, last in times) - first),
        (server.cpu_seconds() - cpu) / many,
    )


def text(servers: list[Server], many: int, rounds: int) -> None:
    """Every server's streams, all taking turns."""
    found: dict[str, list[Turn]] = {server.name: [] for server in servers}
    for number in range(rounds + 2):
        for server in servers:
            one = asyncio.run(turn(server, many, number))
            # The first turns warm everything up.
            if number >= 2:
                found[server.name].append(one)
    own = found[servers[0].name]
    for name, turns in found.items():
        first, rate = (
            statistics.median(getattr(one, field) for one in turns) for field in ("first", "rate")
        )
        cpu = statistics.fmean(one.cpu for one in turns)
        ratio = statistics.median(
            one.first / base.first for one, base in zip(turns, own, strict=True)
        )
        faster = statistics.median(
            one.rate / base.rate for one, base in zip(turns, own, strict=True)
        )
        print(
            f"{name:8} {many:2} streams   first token {1e3 * first:6.1f} ms ({ratio:4.2f}x)   {rate:7.1f} tokens/s "
            f"({faster:4.2f}x)   {1e3 * cpu:7.1f} ms CPU a request ({cpu / statistics.fmean(one.cpu for one in own):4.2f}x)",
            flush=True,
        )


def main() -> int:
    parser = parser_of(__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--without", choices=["text", "embeds"], action="append", default=[])
    options = parser.parse_args()
    python = os.environ.get("BENCH_VLLM")
    if python is None:
        print("BENCH_VLLM names no python of an environment with vLLM: nothing to measure")
        return 0
    # vLLM counts logits that are not finite behind
    # inlay, so beside it too: it is the front that is compared.
    os.environ |= {**_serving.ONE_THREAD, "VLLM_COMPUTE_NANS_IN_LOGITS": "1"}
    shared = (
        *(
            "--kv-cache-memory-bytes",
            CACHE_BYTES,
            "--max-num-seqs",
            64,
            "--max-num-batched-tokens",
            8192,
        ),
        *_serving.VLLM_ARGUMENTS,
    )
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = _serving.wide_model(Path(directory) / "model")
        front = (
            "--engine",
            "vllm",
            "--engine-python",
            python,
            "--num-threads",
            1,
            "--enforce-eager",
        )
        launches = [
            _serving.vllm(model, *shared),
            _serving.inlay(model, *front, *shared, *_serving.wide_limits(64)[:6]),
            _serving.dynamo(model, *shared),
        ]
        with ThreadPoolExecutor() as pool:
            servers = list(pool.map(stack.enter_context, filter(None, launches)))
        if "text" not in options.without:
            for many in (1, MANY):
                text(servers, many, options.rounds)
        if "embeds" not in options.without:
            table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
            for label in ("1 MB", "4 MB", "10 MB"):
                measure(servers, table, label, SIZES[label], options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
