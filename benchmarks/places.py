"""Time a small request waits beside one client that asks for every place in the batch.

One client sends a request with `--choices` choices that end by their length alone; while they are
under way another one asks, again and again, for four tokens. In turns with that the other one asks
alone.

    python -m benchmarks.places [--choices 128] [--max-tokens 1900] [--requests 10] [--rounds 3]
"""

import contextlib
import http.client
import json
import threading
import time
from collections.abc import Iterator

from benchmarks import _serving
from benchmarks._options import parser_of
from inlay import demo

GREEDY, SMALL = "greedy-key", "small-key"


def asked(port: int, key: str, body: dict[str, object]) -> Iterator[float]:
    """Seconds from asking to each event of a stream."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=600)
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {key}"}
    start = time.perf_counter()
    connection.request("POST", "/v1/completions", json.dumps({**body, "stream": True}), headers)
    response = connection.getresponse()
    if response.status != 200:
        raise RuntimeError(f"{response.status}: {response.read()[:300]!r}")
    with contextlib.closing(connection):
        for line in response:
            if line.startswith(b"data: {"):
                yield time.perf_counter() - start


@contextlib.contextmanager
def everything_taken(port: int, choices: int, max_tokens: int) -> Iterator[None]:
    """One client has as many sequences under way as it gets."""
    body = {
        "model": "m",
        "prompt": "Tell me everything.",
        "n": choices,
        "max_tokens": max_tokens,
        "ignore_eos": True,
    }
    going, over = threading.Event(), threading.Event()

    def ask() -> None:
        for _ in asked(port, GREEDY, body):
            going.set()
            if over.is_set():
                return

    thread = threading.Thread(target=ask)
    thread.start()
    going.wait()
    try:
        yield
        if not thread.is_alive():
            raise RuntimeError("the greedy request ended before the small ones did")
    finally:
        over.set()
        thread.join()


def small_requests(port: int, count: int) -> list[tuple[float, float]]:
    """Seconds to the first token and to the end of small requests, one after the other."""
    found = []
    for number in range(count):
        body = {"model": "m", "prompt": f"Request {number}: who?", "max_tokens": 4}
        times = list(asked(port, SMALL, {**body, "ignore_eos": True}))
        found.append((times[0], times[-1]))
        time.sleep(0.1)
    return found


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--choices", type=int, default=128)
    parser.add_argument("--max-tokens", type=int, default=1900)
    parser.add_argument("--requests", type=int, default=10)
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with contextlib.ExitStack() as stack:
        server = stack.enter_context(_serving.inlay(demo.model_dir(), "--api-key", GREEDY, SMALL))
        found: dict[str, list[tuple[float, float]]] = {"alone": [], "beside": []}
        for _ in range(options.rounds):
            found["alone"] += small_requests(server.port, options.requests)
            with everything_taken(server.port, options.choices, options.max_tokens):
                found["beside"] += small_requests(server.port, options.requests)
        for turn, times in found.items():
            first, last = zip(*times, strict=True)
            print(
                f"{turn:7} first token: median {sorted(first)[len(first) // 2] * 1e3:7.1f} ms, worst {max(first) * 1e3:7.1f} ms; "
                f"end: worst {max(last) * 1e3:7.1f} ms ({len(times)} requests)"
            )


if __name__ == "__main__":
    main()
