"""First tokens and gaps of one who chats, beside a batch of the same key, and without.

In turns: nobody else; `--work` unending requests of the same key at a time, as a script would send
them; a batch of the same requests (`/v1/batches`).

    python -m benchmarks.background [--work 64] [--requests 10] [--rounds 2]
"""

import contextlib
import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from benchmarks import _serving
from benchmarks._options import parser_of
from benchmarks.places import asked
from inlay import demo

KEY = "one-key"
JSON = "application/json"
FORM = (
    b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
    b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n%b\r\n--b--'
)
BODY: dict[str, object] = {
    "model": "m",
    "prompt": "Tell me everything.",
    "max_tokens": 150,
    "ignore_eos": True,
}
LINES = 20_000


class Chat(NamedTuple):
    """A short answer: seconds to each token, and to its worker's first step and first token."""

    times: list[float]
    queued: float
    prefilled: float


def chats(port: int, count: int) -> list[Chat]:
    """Short answers, one after the other."""
    found = []
    for number in range(count):
        body = {
            "model": "m",
            "prompt": f"Request {number}: who?",
            "max_tokens": 12,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        times: list[float] = []
        spent: dict[str, Any] = {}
        start = time.perf_counter()
        with opened(port, "POST", "/v1/completions", json.dumps(body).encode(), JSON) as answer:
            for line in answer:
                if line.startswith(b"data: {"):
                    times.append(time.perf_counter() - start)
                    spent = json.loads(line.removeprefix(b"data: ")).get("metrics") or spent
        queued, prefilled = spent["queue_time_ms"] or 0.0, spent["time_to_first_token_ms"]
        found.append(Chat(times[:-1], queued / 1e3, prefilled / 1e3))
        time.sleep(0.1)
    return found


@contextlib.contextmanager
def nobody(port: int, work: int) -> Iterator[list[int]]:
    yield [0]


@contextlib.contextmanager
def script(port: int, work: int) -> Iterator[list[int]]:
    """Requests without end, `work` at a time; counts those that ended."""
    over, done = threading.Event(), [0]

    def ask() -> None:
        while not over.is_set():
            for _ in asked(port, KEY, BODY):
                if over.is_set():
                    return
            done[0] += 1

    threads = [threading.Thread(target=ask) for _ in range(work)]
    for thread in threads:
        thread.start()
    time.sleep(3)
    done[0] = 0
    try:
        yield done
    finally:
        over.set()
        for thread in threads:
            thread.join()


@contextlib.contextmanager
def opened(
    port: int, method: str, path: str, body: bytes, kind: str
) -> Iterator[http.client.HTTPResponse]:
    """The answer to a request."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": kind, "Authorization": f"Bearer {KEY}"}
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        yield connection.getresponse()


def call(port: int, method: str, path: str, body: bytes, kind: str) -> dict[str, object]:
    with opened(port, method, path, body, kind) as answer:
        found: dict[str, object] = json.loads(answer.read())
    return found


def begun(port: int, endpoint: str, bodies: Sequence[dict[str, object]]) -> str:
    """Begin a batch; its id."""
    lines = b"".join(
        json.dumps({"custom_id": f"{n}", "method": "POST", "url": endpoint, "body": body}).encode()
        + b"\n"
        for n, body in enumerate(bodies)
    )
    file = call(port, "POST", "/v1/files", FORM % lines, "multipart/form-data; boundary=b")["id"]
    asked = json.dumps({"input_file_id": file, "endpoint": endpoint}).encode()
    return str(call(port, "POST", "/v1/batches", asked, JSON)["id"])


@contextlib.contextmanager
def batch(port: int, work: int) -> Iterator[list[int]]:
    """A batch that does not end; counts its lines by what the route says."""
    id_ = begun(port, "/v1/completions", [BODY] * LINES)

    def completed() -> int:
        shown = call(port, "GET", f"/v1/batches/{id_}", b"", JSON)["request_counts"]
        return shown["completed"]  # type: ignore[index, no-any-return]

    done = [0]
    while not (before := completed()):  # lines are counted as pieces of them are written
        time.sleep(0.5)
    try:
        yield done
    finally:
        time.sleep(10)  # until the next piece is written
        done[0] = completed() - before
        call(port, "POST", f"/v1/batches/{id_}/cancel", b"", JSON)
        time.sleep(2)


SCENES = {"nobody": nobody, "script": script, "batch": batch}


class Measured(NamedTuple):
    """What was seen in a scene: answers, and lines a second of the others' work."""

    answers: list[Chat]
    rates: list[float]

    def first(self) -> float:
        """Milliseconds to the first token, the median."""
        return statistics.median(each.times[0] for each in self.answers) * 1e3

    def gap(self) -> float:
        """Milliseconds between two tokens, the median."""
        gaps = [b - a for each in self.answers for a, b in pairwise(each.times)]
        return statistics.median(gaps) * 1e3


def measured(names: Sequence[str], requests: int, rounds: int, work: int = 0) -> list[Measured]:
    """Chat in scenes, in turns."""
    found = {name: Measured([], []) for name in names}
    arguments = (
        "--api-key", KEY, "--max-num-seqs", "32", "--batch-store", "memory",
        "--enable-per-request-metrics",
    )  # fmt: skip
    with _serving.inlay(demo.model_dir(), *arguments) as server:
        for _ in range(rounds):
            for name in names:
                began = time.perf_counter()
                with SCENES[name](server.port, work) as done:
                    found[name].answers.extend(chats(server.port, requests))
                found[name].rates.append(done[0] / (time.perf_counter() - began))
    return [found[name] for name in names]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--work", type=int, default=64)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    seen = measured(list(SCENES), options.requests, options.rounds, options.work)
    for name, scene in zip(SCENES, seen, strict=True):
        firsts = sorted(each.times[0] * 1e3 for each in scene.answers)
        queued = statistics.median(each.queued for each in scene.answers) * 1e3
        prefilled = statistics.median(each.prefilled for each in scene.answers) * 1e3
        print(
            f"{name:7} first token: median {scene.first():7.1f} ms (waited {queued:.1f} for a "
            f"step, then {prefilled:.1f}), 90% {firsts[int(0.9 * len(firsts))]:7.1f} ms; gap: "
            f"median {scene.gap():6.1f} ms; {statistics.fmean(scene.rates):5.1f} lines a second"
        )


if __name__ == "__main__":
    main()
