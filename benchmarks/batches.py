"""What batches cost others, what they gain, and how soon another frontend goes on with one.

    python -m benchmarks.batches [--texts 128] [--requests 10] [--rounds 2]

In one run, side by side: first tokens and gaps of one who chats, with a batch of the same key and
without (as `benchmarks.background`); texts embedded a second by a batch of one text a line, by a
client that sends one at a time, and by one that sends 16 texts at a time from 8 threads; seconds
until a second frontend of the same store has the batch of one that was killed; a decision about a
state that the worker knows, and about one that it does not. On a busy machine ratios alone count.
"""

import contextlib
import json
import os
import re
import signal
import statistics
import tempfile
import time
import urllib.request
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

from benchmarks import _serving
from benchmarks._options import parser_of
from benchmarks.background import JSON, KEY, begun, call, measured
from benchmarks.embeddings import corpus, model_directory
from inlay import demo

AT_ONCE, EACH = 8, 16


def interactive(requests: int, rounds: int) -> None:
    """Chats beside a batch, and alone."""
    alone, beside = measured(("nobody", "batch"), requests, rounds)
    for name, one, other in (
        ("first token", alone.first(), beside.first()),
        ("gap", alone.gap(), beside.gap()),
    ):
        print(f"{name}: {one:.1f} ms alone, {other:.1f} beside: {other / one:.2f} x")


def embedding(count: int, rounds: int) -> None:
    """Texts a second of a batch, and of clients."""
    texts = corpus(count)

    def post(port: int, given: object) -> None:
        body = json.dumps({"model": "m", "input": given, "encoding_format": "base64"}).encode()
        call(port, "POST", "/v1/embeddings", body, JSON)

    def single(port: int) -> None:
        for text in texts:
            post(port, text)

    def threads(port: int) -> None:
        parts = [texts[start : start + EACH] for start in range(0, count, EACH)]
        with ThreadPoolExecutor(AT_ONCE) as pool:
            list(pool.map(lambda part: post(port, part), parts))

    def whole(port: int) -> None:
        bodies: list[dict[str, object]] = [
            {"model": "m", "input": text, "encoding_format": "base64"} for text in texts
        ]
        id_ = begun(port, "/v1/embeddings", bodies)
        while call(port, "GET", f"/v1/batches/{id_}", b"", JSON)["status"] != "completed":
            time.sleep(0.05)

    ways: dict[str, Callable[[int], None]] = {"single": single, "threads": threads, "batch": whole}
    rates: dict[str, list[float]] = {name: [] for name in ways}
    arguments = ("--api-key", KEY, "--batch-store", "memory", "--embedding-cache-bytes", "0")
    with model_directory() as model, _serving.inlay(model, *arguments) as server:
        post(server.port, texts[:EACH])
        for _ in range(rounds):
            for name, way in ways.items():
                start = time.perf_counter()
                way(server.port)
                rates[name].append(count / (time.perf_counter() - start))
    single_, threads_, batch_ = (max(rates[name]) for name in ways)
    print(
        f"texts a second: one at a time {single_:.0f}, {AT_ONCE} x {EACH} {threads_:.0f}, batch "
        f"{batch_:.0f}: {batch_ / single_:.2f} x and {batch_ / threads_:.2f} x"
    )


def takeover() -> None:
    """Seconds until the batch of a killed frontend is another's."""
    body: dict[str, object] = {"model": "m", "prompt": "Tell me.", "max_tokens": 40}
    with contextlib.ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        arguments = (
            "--api-key", KEY, "--batch-store", folder / "store", "--state-dir", folder / "state"
        )  # fmt: skip
        one, other = (
            stack.enter_context(_serving.inlay(demo.model_dir(), *arguments)) for _ in range(2)
        )
        id_ = begun(one.port, "/v1/completions", [body] * 20_000)
        while call(other.port, "GET", f"/v1/batches/{id_}", b"", JSON)["status"] != "in_progress":
            time.sleep(0.1)
        for pid in one.every_pid():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        start = time.perf_counter()
        while not _takeovers(other):
            time.sleep(0.1)
        print(f"taken over after {time.perf_counter() - start:.1f} s")


def _takeovers(server: _serving.Server) -> float:
    with urllib.request.urlopen(f"http://127.0.0.1:{server.port}/metrics") as answer:
        text = answer.read().decode()
    found = re.search(r"^inlay:batch_takeovers_total (\S+)", text, re.MULTILINE)
    return 0.0 if found is None else float(found[1])


def decisions(rounds: int) -> None:
    """A decision about a state that is cached, and about one that is not."""
    words = ["lantern", "harbour", "night", "town", "island", "ship", "number", "book"]
    question = {"type": "predicate", "instructions": "Is it damaged?"}

    def asked(port: int, seed: int, number: int) -> float:
        state = " ".join(words[(seed * 7 + n * n) % len(words)] + str(seed) for n in range(180))
        what = {**question, "instructions": f"{number}: is it damaged?"}
        body = json.dumps({"model": "m", "input": state, "questions": [what]}).encode()
        start = time.perf_counter()
        call(port, "POST", "/v1/decisions", body, JSON)
        return time.perf_counter() - start

    with _serving.inlay(demo.model_dir(), "--api-key", KEY) as server:
        asked(server.port, 0, 0)
        told = [[asked(server.port, n, k) for k in range(4)] for n in range(1, 1 + 5 * rounds)]
    new = statistics.median(each[0] for each in told) * 1e3
    known = statistics.median(seconds for each in told for seconds in each[1:]) * 1e3
    print(f"decision: {new:.1f} ms of a new state, {known:.1f} of a known one")


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--texts", type=int, default=128)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    embedding(options.texts, options.rounds)
    decisions(options.rounds)
    interactive(options.requests, options.rounds)
    takeover()


if __name__ == "__main__":
    main()
