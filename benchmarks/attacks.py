"""What a second client waits, and what memory a server takes, during each attack.

Each row starts a server of its own with a key for each client. The second client asks for one
token, an image or a vector, every time on a new connection and every 20 ms, first with nobody else
there (quiet), then while the attackers, which run at lower priority, send what the row says without
a pause. An answer that takes long hides the requests that would have been sent meanwhile: they are
counted with what they would have waited (coordinated omission), so that a percentile is one of
time.

With `--against` the same attacks run on another checkout of this repository in the same run, in
turns.

    python -m benchmarks.attacks [NAME ...] [--seconds 6] [--against DIR]
"""

import contextlib
import http.client
import math
import multiprocessing
import os
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from multiprocessing.synchronize import Event
from pathlib import Path
from typing import NamedTuple

import psutil

from benchmarks import _serving, memory
from benchmarks._attackers import KEYS, TIMEOUT, Answers, Target
from benchmarks._attacks import ATTACKS, Attack
from benchmarks._options import parser_of

HERE = Path(__file__).resolve().parents[1]
INTERVAL = 0.02
"""Seconds from one request of the second client to the next."""

AUTOGROUP = Path("/proc/self/autogroup")
"""Where Linux shares cores among sessions, niceness counts within one: this is a session's own."""

BYSTANDER = "bystander"
"""API key of the second client."""

NICER = 10
"""How much nicer attackers are: on another machine they would take no core from the server."""

SETTLE = 8.0
"""Seconds after an attack at which memory is looked at again."""


class Waits(NamedTuple):
    """What the second client waited.

    Attributes:
        milliseconds: sorted, those of requests that were not sent for waiting included.
        failures: answers by status that were no answer to what was asked.
    """

    milliseconds: list[float]
    failures: Answers

    def quantile(self, part: float) -> float:
        """The wait that `part` of all are within."""
        return self.milliseconds[
            min(int(len(self.milliseconds) * part), len(self.milliseconds) - 1)
        ]

    def shown(self) -> str:
        """Median, 99th percentile and longest, as a table has them."""
        return " / ".join(f"{self.quantile(part):.0f}" for part in (0.5, 0.99, 1.0)) + (
            f" ({', '.join(f'{count}x {status}' for status, count in self.failures.items())})"
            if self.failures
            else ""
        )


def asking(port: int, attack: Attack, seconds: float) -> Waits:
    """Ask for `seconds` as the second client does."""
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {BYSTANDER}"}
    waits: list[float] = []
    failures: Answers = Counter()
    end = time.perf_counter() + seconds
    while (start := time.perf_counter()) < end:
        post = attack.asked(time.monotonic_ns())
        connection = http.client.HTTPConnection(
            "127.0.0.1", port, timeout=TIMEOUT, source_address=("127.0.0.2", 0)
        )
        with contextlib.closing(connection):
            try:
                connection.request("POST", post.path, post.body, headers)
                response = connection.getresponse()
                response.read()
                if response.status != 200:
                    failures[str(response.status)] += 1
            except (OSError, http.client.HTTPException) as error:
                failures[type(error).__name__] += 1
        took = time.perf_counter() - start
        waits += [took - missed * INTERVAL for missed in range(max(1, math.ceil(took / INTERVAL)))]
        time.sleep(max(0.0, start + INTERVAL - time.perf_counter()))
    return Waits(sorted(wait * 1e3 for wait in waits), failures)


def give_way(autogroup: Path) -> None:
    """Have the session of this process be nicer than others, where Linux counts by session."""
    if autogroup.exists():
        try:
            autogroup.write_text(str(NICER), encoding="ascii")
        except OSError as error:  # not everybody may
            print(f"attackers have the same share of cores as the server: {error}", file=sys.stderr)


@contextlib.contextmanager
def attacking(attack: Attack, target: Target) -> Iterator[Answers]:
    """Attack until the block ends; what was answered stands in the counter afterwards."""
    context = multiprocessing.get_context("fork")
    ready, stop, queue = context.Event(), context.Event(), context.SimpleQueue()

    def run(ready: Event, stop: Event) -> None:
        os.setsid()
        os.nice(NICER)
        give_way(AUTOGROUP)
        send = attack.prepare()
        ready.set()
        queue.put(send(target, stop))

    process = context.Process(target=run, args=(ready, stop), daemon=True)
    process.start()
    answers: Answers = Counter()
    try:
        if not ready.wait(120):
            raise RuntimeError(f"{attack.name}: the attack was not prepared in time")
        yield answers
        stop.set()
        process.join(10)
        if not queue.empty():
            answers.update(queue.get())
    finally:
        process.kill()
        process.join()


@dataclass(frozen=True)
class Row:
    """One attack on one checkout.

    Attributes:
        peak: bytes by which the resident memory of the process that takes requests grew at most.
        others: bytes by which the private memory of its other processes grew at most.
        left: bytes of the former that are still there `SETTLE` seconds later.
    """

    quiet: Waits
    attacked: Waits
    peak: int
    others: int
    left: int
    answers: Answers

    def shown(self, attack: Attack, checkout: str) -> str:
        """As a line of the table."""
        answers = ", ".join(
            f"{count:,}x {status}" for status, count in sorted(self.answers.items())
        )
        sizes = " / ".join(
            f"{size / memory.MIB:+.0f}" for size in (self.peak, self.left, self.others)
        )
        cells = (
            attack.name,
            attack.sent,
            checkout,
            self.quiet.shown(),
            self.attacked.shown(),
            sizes,
            answers,
        )
        return f"| {' | '.join(cells)} |"


HEAD = (
    "| attack | sent | of | quiet: p50 / p99 / longest, ms | attacked | "
    "memory, MiB: peak / left / other processes | attackers' answers |\n|---|---|---|---|---|---|---|"
)


def measure(attack: Attack, checkout: Path, seconds: float) -> Row:
    """What `attack` does to a fresh server of a checkout."""
    keys = [word for key in (*KEYS, BYSTANDER) for word in ("--api-key", key)]
    environment = {"PYTHONPATH": str(checkout / "src"), "OMP_NUM_THREADS": "1"}
    launched: contextlib.AbstractContextManager[_serving.Server]
    if attack.fleet:
        # An older checkout has no such flag of the worker's.
        launched = _serving.inlay_fleet(
            attack.model(), frontend=tuple(keys), environment=environment, embeds=False
        )
    else:
        launched = _serving.inlay(attack.model(), *keys, *attack.flags, environment=environment)
    with launched as server:
        port = server.port
        asking(port, attack, 1.0)
        quiet = asking(port, attack, seconds / 2)
        with (
            memory.Watch(server) as watch,
            attacking(attack, Target(port, server.nats_port, worker_ports(server))) as answers,
        ):
            time.sleep(0.2)
            attacked = asking(port, attack, seconds)
        time.sleep(SETTLE)
        return Row(quiet, attacked, watch.front, watch.others, watch.left(), answers)


def worker_ports(server: _serving.Server) -> tuple[int, ...]:
    """Where the workers of a fleet listen, besides its frontend and its NATS server."""
    known = {server.port, server.nats_port}
    return tuple(
        each.laddr.port
        for pid in server.every_pid()
        for each in psutil.Process(pid).net_connections("tcp")
        if server.nats_port and each.status == psutil.CONN_LISTEN and each.laddr.port not in known
    )


def name_of(checkout: Path) -> str:
    """The commit of a checkout, or its folder's name."""
    command = ["git", "-C", str(checkout), "rev-parse", "--short", "HEAD"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.strip() or checkout.name


def main() -> None:
    names = [attack.name for attack in ATTACKS]
    parser = parser_of(__doc__)
    parser.add_argument(
        "only", nargs="*", metavar="NAME", help=f"of {', '.join(names)}; all of them"
    )
    parser.add_argument("--seconds", type=float, default=6.0, help="each attack takes")
    parser.add_argument("--against", type=Path, help="another checkout, measured in the same run")
    options = parser.parse_args()
    unknown = set(options.only) - set(names)
    if unknown:
        sys.exit(f"no attack {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    checkouts: Sequence[Path] = (
        [HERE] if options.against is None else [options.against.resolve(), HERE]
    )
    print(HEAD, flush=True)
    for attack in ATTACKS:
        if options.only and attack.name not in options.only:
            continue
        for checkout in checkouts:
            row = measure(attack, checkout, options.seconds)
            print(row.shown(attack, name_of(checkout)), flush=True)


if __name__ == "__main__":
    main()
