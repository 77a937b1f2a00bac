"""First tokens and gaps of one who chats, beside a batch of the same key, and without.

In turns: nobody else; `--work` unending requests of the same key at a time, as a script would send
them; a batch of the same requests (`/v1/batches`).

    python -m benchmarks.background [--work 64] [--requests 10] [--rounds 2]
"""

import argparse
import contextlib
import http.client
import json
import statistics
import threading
import time
from collections.abc import Iterator
from itertools import pairwise

from benchmarks import _serving
from benchmarks.places import asked
from inlay import demo

KEY = "one-key"
BODY = {"model": "m", "prompt": "Tell me everything.", "max_tokens": 150, "ignore_eos": True}
LINES = 20_000


def chats(port: int, count: int) -> list[list[float]]:
    """Seconds to each token of short answers, one after the other."""
    found = []
    for number in range(count):
        body = {"model": "m", "prompt": f"Request {number}: who?", "max_tokens": 12}
        found.append(list(asked(port, KEY, {**body, "ignore_eos": True})))
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


def call(port: int, method: str, path: str, body: bytes, kind: str) -> dict[str, object]:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": kind, "Authorization": f"Bearer {KEY}"}
    with contextlib.closing(connection):
        connection.request(method, path, body, headers)
        answer: dict[str, object] = json.loads(connection.getresponse().read())
    return answer


@contextlib.contextmanager
def batch(port: int, work: int) -> Iterator[list[int]]:
    """A batch that does not end; counts its lines by what the route says."""
    lines = b"".join(
        json.dumps(
            {"custom_id": f"{n}", "method": "POST", "url": "/v1/completions", "body": BODY}
        ).encode()
        + b"\n"
        for n in range(LINES)
    )
    form = (
        b'--b\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n--b\r\n'
        b'Content-Disposition: form-data; name="file"; filename="a"\r\n\r\n' + lines + b"\r\n--b--"
    )
    file = call(port, "POST", "/v1/files", form, "multipart/form-data; boundary=b")["id"]
    made = {"input_file_id": file, "endpoint": "/v1/completions"}
    js = "application/json"
    id_ = call(port, "POST", "/v1/batches", json.dumps(made).encode(), js)["id"]

    def completed() -> int:
        shown = call(port, "GET", f"/v1/batches/{id_}", b"", js)["request_counts"]
        return shown["completed"]  # type: ignore[index, no-any-return]

    done = [0]
    while not (before := completed()):  # lines are counted as pieces of them are written
        time.sleep(0.5)
    try:
        yield done
    finally:
        time.sleep(10)  # until the next piece is written
        done[0] = completed() - before
        call(port, "POST", f"/v1/batches/{id_}/cancel", b"", js)
        time.sleep(2)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--work", type=int, default=64)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=2)
    options = parser.parse_args()
    scenes = {"nobody": nobody, "script": script, "batch": batch}
    found: dict[str, list[list[float]]] = {name: [] for name in scenes}
    rates: dict[str, list[float]] = {name: [] for name in scenes}
    arguments = ("--api-key", KEY, "--max-num-seqs", "32", "--batch-store", "memory")
    with _serving.inlay(demo.model_dir(), *arguments) as server:
        for _ in range(options.rounds):
            for name, scene in scenes.items():
                began = time.perf_counter()
                with scene(server.port, options.work) as done:
                    found[name] += chats(server.port, options.requests)
                rates[name].append(done[0] / (time.perf_counter() - began))
    for name, answers in found.items():
        first = sorted(times[0] * 1e3 for times in answers)
        gaps = [(b - a) * 1e3 for times in answers for a, b in pairwise(times)]
        print(
            f"{name:7} first token: median {statistics.median(first):7.1f} ms, "
            f"90% {first[int(0.9 * len(first))]:7.1f} ms; gap: median "
            f"{statistics.median(gaps):6.1f} ms, mean {statistics.fmean(gaps):6.1f} ms; "
            f"{statistics.fmean(rates[name]):5.1f} lines a second"
        )


if __name__ == "__main__":
    main()
