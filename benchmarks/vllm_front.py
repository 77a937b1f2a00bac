"""vLLM's own server beside inlay in front of vLLM: the same engine, settings and model, so what differs is the way to it.

All servers run at once and take turns. For text: time to the first token, tokens a second of one stream, and CPU seconds a request of all
processes. For embeddings: what a cached prompt costs over the same as ids (`benchmarks.cached_prompt`).

    BENCH_VLLM=/path/to/python python -m benchmarks.vllm_front [--rounds N]
"""

import argparse
import http.client
import json
import os
import statistics
import sys
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from safetensors.torch import load_file

from benchmarks import _serving
from benchmarks._serving import Server
from benchmarks.cached_prompt import HIDDEN, SIZES, measure

PROMPT_TOKENS, OUTPUT_TOKENS = 64, 64
CACHE_BYTES = 1 << 30


@dataclass(frozen=True)
class Streamed:
    """One text request: seconds to its first token, tokens a second after it, CPU seconds of the server's processes."""

    first: float
    rate: float
    cpu: float


def streamed(server: Server, seed: int) -> Streamed:
    """Ask for a stream of text, with a prompt that is new each time."""
    prompt = [3 + (seed * 7919 + 31 * index) % 480 for index in range(PROMPT_TOKENS)]
    fields = {
        "model": "m",
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
    }
    cpu = server.cpu_seconds()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=120)
    start = time.perf_counter()
    connection.request(
        "POST", "/v1/completions", json.dumps(fields).encode(), {"Content-Type": "application/json"}
    )
    response = connection.getresponse()
    times = []
    while line := response.readline():
        if line.startswith(b"data: {"):
            times.append(time.perf_counter())
    connection.close()
    if response.status != 200 or len(times) < 2:
        raise RuntimeError(f"{server.name}: status {response.status}, {len(times)} events")
    rate = (OUTPUT_TOKENS - 1) / (times[-1] - times[0])
    return Streamed(times[0] - start, rate, server.cpu_seconds() - cpu)


def text(servers: list[Server], rounds: int) -> None:
    """Every server's streams, all taking turns."""
    found: dict[str, list[Streamed]] = {server.name: [] for server in servers}
    for turn in range(rounds + 2):
        for server in servers:
            one = streamed(server, turn)
            if turn >= 2:
                found[server.name].append(one)
    for name, all_ in found.items():
        first, rate, cpu = (
            statistics.median(getattr(one, field) for one in all_) for field in ("first", "rate", "cpu")
        )
        print(
            f"{name:8} text {PROMPT_TOKENS}+{OUTPUT_TOKENS} tokens   first {1e3 * first:6.1f} ms   {rate:6.1f} tokens/s   "
            f"{cpu:6.3f} CPU s a request",
            flush=True,
        )


def main() -> int:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    python = os.environ.get("BENCH_VLLM")
    if python is None:
        print("BENCH_VLLM names no python of an environment with vLLM: nothing to measure")
        return 0
    shared = ("--kv-cache-memory-bytes", CACHE_BYTES, *_serving.VLLM_ARGUMENTS)
    # vLLM counts non-finite logits behind inlay, so beside it too: it is the front that is compared.
    os.environ["VLLM_COMPUTE_NANS_IN_LOGITS"] = "1"
    with tempfile.TemporaryDirectory() as directory, ExitStack() as stack:
        model = _serving.wide_model(Path(directory) / "model", hidden=HIDDEN)
        table = load_file(model / "model.safetensors")["model.embed_tokens.weight"]
        limits = _serving.wide_limits(64)[:6]
        own = _serving.vllm(model, *shared)
        if own is None:
            return 0
        front = ("--engine", "vllm", "--engine-python", python, "--enforce-eager", *shared)
        servers = [stack.enter_context(own), stack.enter_context(_serving.inlay(model, *front, *limits))]
        text(servers, options.rounds)
        for label in ("1 MB", "10 MB"):
            measure(servers, table, label, SIZES[label], options.rounds)
    return 0


if __name__ == "__main__":
    sys.exit(main())
