"""Prefill and decode workers beside workers of both roles: the router's choices, workers on paper.

Workers run steps: a token of every sequence that is decoded, and prompts' positions up to a budget.
A prompt that is handed over is fetched at a price, in positions computed, each chunk while the next
is computed; its last block is computed again. Time is virtual. The trace is that of
`router_simulation`. With several seeds, each of a trace and of how the router breaks ties, means are
printed, and how much longer each fleet takes for the same traces, with its confidence interval.

    python -m benchmarks.roles_simulation [--workers N] [--requests N] [--interference-weight W]
        [--seeds N] [--loads L ...] [--prices P ...]

Tried without gain, p99 between tokens beside workers of both roles, where the rule has 0.779:
no constraint for prompts that are not better computed elsewhere (1.054); the strength of a role
less the price (0.938). Strength by what is left to compute, and delaying each sequence of a prefill
worker, changed nothing (1.032 and 1.025 against 1.027).
"""

import argparse
import heapq
import math
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from random import Random
from typing import NamedTuple

import msgspec
import numpy as np

from benchmarks._options import parser_of
from benchmarks.router_simulation import (
    BUDGET,
    PREFILL,
    SECRET,
    SLOWED_BY,
    TOKEN_SECONDS,
    Paper,
    SimulatedRequest,
    card,
    trace,
)
from inlay.messages.card import Address, Phase
from inlay.messages.digest import BLOCK_SIZE
from inlay.messages.routing import WorkerLoad, routing_chain
from inlay.router.decide import Ask, Part, Placement, decide
from inlay.router.index import Keys, keys_of
from inlay.router.member import PoolMember
from inlay.router.settings import RouterSettings
from inlay.router.snapshot import Pool

PRICES = (0.05, 0.2, 0.5, 2.0)
LOADS = (0.2, 0.5, 0.8)
ROUND_TRIP = 0.001


@dataclass(eq=False)
class Job:
    """A request, and when its tokens came."""

    keys: Keys
    blocks: list[int]
    length: int
    output: int
    at: float
    left: int = 0
    tokens: list[float] = field(default_factory=list)
    then: Callable[[], None] = lambda: None


class Stepping(Paper):
    """A worker on paper that runs steps."""

    def prepare(self) -> None:
        """Have nothing to do."""
        self.prompts: deque[Job] = deque()
        self.decoding: list[Job] = []
        self.busy = False

    def step(self) -> tuple[float, list[Job]]:
        """Seconds of the next step, and the prompts that it ends."""
        room, ended = BUDGET, []
        for job in self.prompts:
            done = min(job.left, room)
            job.left -= done
            room -= done
            if not job.left:
                ended.append(job)
            if not room:
                break
        for _ in ended:
            self.prompts.popleft()
        slower = 1 + len(self.decoding) / SLOWED_BY
        return TOKEN_SECONDS * slower + (BUDGET - room) / PREFILL, ended


class Outcome(NamedTuple):
    """What clients see, in seconds, and the share of prompts that were handed over."""

    first: float
    first99: float
    gap99: float
    whole: float
    handed: float


class Fleet:
    """Workers of such roles before one frontend, and a link of such a price."""

    def __init__(
        self, phases: list[Phase], price: float, blocks: int, weight: float, seed: int = 1
    ) -> None:
        self.now = 0.0
        self.price = price
        settings = RouterSettings(router_worker_backlog=100.0, router_interference_weight=weight)
        self.pool = Pool(settings, Random(seed), lambda: self.now)
        self.workers: dict[str, Stepping] = {}
        for number, phase in enumerate(phases):
            made = msgspec.structs.replace(
                card(blocks, events=False),
                phase=phase,
                kv_layout="l",
                address=Address("h", number + 1, b"f"),
            )
            worker = self.workers[f"worker-{number}"] = Stepping(f"worker-{number}", made)
            worker.prepare()
        self.pool.take(list(self.workers.values()), lambda _: WorkerLoad())
        self._queue: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count()
        self.handed = 0
        self.done: list[Job] = []

    def after(self, seconds: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._queue, (self.now + seconds, next(self._numbers), act))

    def run(self, requests: list[SimulatedRequest]) -> Outcome:
        for request in requests:
            self.after(request.at, partial(self._request, request))
        while self._queue:
            self.now, _, act = heapq.heappop(self._queue)
            act()
        first = sorted(job.tokens[0] - job.at for job in self.done)
        gaps = sorted(
            later - before
            for job in self.done
            for before, later in zip(job.tokens, job.tokens[1:], strict=False)
        )
        whole = [job.tokens[-1] - job.at for job in self.done]
        assert len(self.done) == len(requests)
        return Outcome(
            sum(first) / len(first),
            first[int(0.99 * len(first))],
            gaps[int(0.99 * len(gaps))],
            sum(whole) / len(whole),
            self.handed / len(requests),
        )

    def _request(self, request: SimulatedRequest) -> None:
        chain = routing_chain(request.prompt, next(iter(self.workers.values())).card, SECRET)
        keys, length = keys_of(chain), len(request.prompt)
        job = Job(keys, keys.tolist(), length, request.output, self.now)
        splits = self.pool.has_prefill_workers
        placement = decide(self.pool.view(), Ask(length, keys, divisible=splits))
        assert isinstance(placement, Placement)
        if placement.prompt is None:
            self._compute(job, placement.part)
            return
        self.handed += 1
        goes_on = self.pool.seated[placement.part.seat]
        self.pool.change(goes_on, requests=1)
        self._compute(job, placement.prompt, goes_on)

    def _compute(self, job: Job, chosen: Part, goes_on: PoolMember | None = None) -> None:
        """Send a prompt to a worker; its tokens come from there, or from the one that goes on."""
        member = self.pool.seated[chosen.seat]
        worker = self.workers[member.id]
        idle, began, work = not member.load.prefill, self.now, chosen.work
        held = max(worker.has(job.blocks) * BLOCK_SIZE, 0)
        fetched = 0
        if chosen.holders and self.price < 1:
            held_there = max(
                other.has(job.blocks) * BLOCK_SIZE
                for other in self.workers.values()
                if other.card.address in chosen.holders
            )
            fetched = max(held_there - held, 0)
        self.pool.sent(member, job.keys)
        self.pool.change(member, requests=1, prefill=work)
        job.left = max(job.length - held - fetched, 1)

        def computed() -> None:
            self.pool.change(member, prefill=-work, decode=job.length)
            if idle:
                self._measure(chosen, job.length - chosen.cached, self.now - began)
            job.tokens.append(self.now)
            if goes_on is None:
                worker.decoding.append(job)
                job.then = lambda: self.pool.change(member, requests=-1, decode=-job.length)
            else:
                self.pool.change(member, requests=-1, decode=-job.length)
                self._go_on(job, goes_on, self.now - began)

        job.then = computed
        worker.take(job.blocks)
        self._fetch(worker, job, fetched)

    def _measure(self, chosen: Part, positions: int, seconds: float) -> None:
        """Tell the router's price what a prompt has cost."""
        price, fetchable = self.pool.price, chosen.fetchable
        if chosen.holders:
            price.fetched(fetchable, seconds, positions - fetchable)
        else:
            price.computed(positions, seconds)

    def _go_on(self, job: Job, member: PoolMember, computing: float) -> None:
        """Make the rest of its tokens at another worker; it was computed for so many seconds."""
        worker, began = self.workers[member.id], self.now
        idle = not member.load.prefill
        held = worker.has(job.blocks) * BLOCK_SIZE
        fetched = max(job.length - held, 0) // BLOCK_SIZE * BLOCK_SIZE
        job.left = job.length - held - fetched + 1
        worker.take(job.blocks)
        self.pool.sent(member, job.keys)
        self.pool.change(member, prefill=job.left)
        left = job.left

        def computed() -> None:
            self.pool.change(member, prefill=-left, decode=job.length)
            if idle:
                self.pool.price.fetched(fetched, self.now - began)
            job.tokens.append(self.now)
            worker.decoding.append(job)
            job.then = lambda: self.pool.change(member, requests=-1, decode=-job.length)

        job.then = computed
        # What came meanwhile is here: the last chunk is not, nor what the link had no time for.
        overlapped = int(computing * PREFILL / self.price)
        self._fetch(worker, job, min(fetched, max(BUDGET, fetched - overlapped)))

    def _fetch(self, worker: Stepping, job: Job, positions: int) -> None:
        def there() -> None:
            worker.prompts.append(job)
            self._run(worker)

        if positions:
            self.after(ROUND_TRIP + positions * self.price / PREFILL, there)
        else:
            there()

    def _run(self, worker: Stepping) -> None:
        if worker.busy or not (worker.prompts or worker.decoding):
            return
        worker.busy = True
        decoding = list(worker.decoding)
        seconds, ended = worker.step()

        def over() -> None:
            worker.busy = False
            for job in decoding:
                job.tokens.append(self.now)
            for job in ended:
                job.then()
            for job in [job for job in worker.decoding if len(job.tokens) >= job.output]:
                worker.decoding.remove(job)
                self.done.append(job)
                job.then()
            self._run(worker)

        self.after(seconds, over)


class Compared(NamedTuple):
    """Ratio of two outcomes over some traces: mean, and its confidence interval of 95%."""

    mean: float
    low: float
    high: float

    @classmethod
    def of(cls, pairs: list[tuple[float, float]]) -> "Compared":
        """Compare pairs of values, each of one trace."""
        logs = np.log([value / other for value, other in pairs])
        drawn = np.random.default_rng(1).choice(logs, (2000, len(logs))).mean(axis=1)
        low, high = np.quantile(drawn, (0.025, 0.975))
        return cls(*(math.exp(value) for value in (logs.mean(), low, high)))

    def __str__(self) -> str:
        return f"{self.mean:.3f} ({self.low:.3f}-{self.high:.3f})"


def outcomes(
    phases: list[Phase],
    price: float,
    asked: argparse.Namespace,
    traces: list[list[SimulatedRequest]],
) -> list[Outcome]:
    """Return what clients see, by trace."""
    return [
        Fleet(phases, price, asked.blocks, asked.interference_weight, seed).run(requests)
        for seed, requests in enumerate(traces, 1)
    ]


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=18)
    parser.add_argument("--requests", type=int, default=3000)
    parser.add_argument("--apps", type=int, default=400)
    parser.add_argument("--blocks", type=int, default=2048)
    usual = RouterSettings().router_interference_weight
    parser.add_argument("--interference-weight", type=float, default=usual)
    parser.add_argument("--seeds", type=int, default=1)
    parser.add_argument("--loads", type=float, nargs="+", default=LOADS)
    parser.add_argument("--prices", type=float, nargs="+", default=PRICES)
    asked = parser.parse_args()
    mean = sum(len(request.prompt) for request in trace(300, 1, asked.apps, Random(1))) / 300
    worst = [0.0] * 4
    for load in asked.loads:
        rate = load * asked.workers * PREFILL / mean
        traces = [
            trace(asked.requests, rate, asked.apps, Random(seed))
            for seed in range(1, asked.seeds + 1)
        ]
        for price in asked.prices:
            both = outcomes(["both"] * asked.workers, price, asked, traces)
            print(f"load {load:.1f}, price {price:.2f}: {'both':8} {_line(both)}", flush=True)
            for parts in (2, 3, 5, 9):
                number = asked.workers // parts
                phases: list[Phase] = ["prefill"] * number
                phases += ["decode"] * (asked.workers - number)
                found = outcomes(phases, price, asked, traces)
                ratios = [
                    Compared.of(
                        [(one[n], other[n]) for one, other in zip(found, both, strict=True)]
                    )
                    for n in range(4)
                ]
                worst = [max(a, b.mean) for a, b in zip(worst, ratios, strict=True)]
                print(f"{'':24} 1:{parts - 1:<6} {_line(found)}", flush=True)
                print(f"{'':33}beside both {'; '.join(map(str, ratios))}", flush=True)
    print(
        "at most, beside workers of both roles: first token "
        f"{worst[0]:.3f}, p99 {worst[1]:.3f}; between tokens p99 {worst[2]:.3f}; "
        f"whole {worst[3]:.3f}"
    )


def _line(outcomes: list[Outcome]) -> str:
    found = Outcome(*(sum(values) / len(outcomes) for values in zip(*outcomes, strict=True)))
    return (
        f"first token {1000 * found.first:5.0f} ms, p99 {1000 * found.first99:6.0f}; "
        f"between tokens p99 {1000 * found.gap99:4.0f}; whole {found.whole:6.3f} s; "
        f"handed over {found.handed:4.0%}"
    )


if __name__ == "__main__":
    main()
