"""A fleet on paper: workers that run steps, and requests that come at random times.

A step takes the times of `StepTimes`. As the torch engine does, it gives every decoded sequence a
token and has room for so many prompt positions, first come first served. Requests go to the worker
with the least to do, by the router's own weights. Time is virtual.
"""

import heapq
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import count
from typing import NamedTuple

import numpy as np

from inlay.router.settings import RouterSettings

WARM_UP = 0.2
"""Share of the requests, at the beginning, whose times do not count: the fleet is empty then."""
_NO_SPREAD = 0.01

_WEIGHTS = RouterSettings()


@dataclass(frozen=True)
class StepTimes:
    """Times of a worker, in seconds.

    Attributes:
        step: a step, whatever is in it.
        per_sequence: more for each sequence that is decoded in it.
        per_position: more for each prompt position that is computed in it.
        overhead: of a first token outside of steps: frontend, network.
        max_num_seqs: sequences that run at a time.
        max_num_batched_tokens: prompt positions in a step.
    """

    step: float
    per_sequence: float
    per_position: float
    overhead: float
    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True)
class Demand:
    """Requests that come to a fleet.

    Attributes:
        rate: requests a second, at random times.
        input_len: positions of a prompt, on average.
        output_len: tokens of an answer, on average.
        cached_share: of a prompt's positions, found in the cache of its worker.
        spread: standard deviation of both lengths, as a share of their mean.
    """

    rate: float
    input_len: int
    output_len: int
    cached_share: float
    spread: float


class Asked(NamedTuple):
    """One request.

    Attributes:
        at: seconds from the start.
        length: positions of the prompt.
        computed: of these, those that are not cached.
        tokens: of the answer.
    """

    at: float
    length: int
    computed: int
    tokens: int


def requests_of(demand: Demand, count: int, seed: int) -> list[Asked]:
    """So many requests, the same ones for the same seed."""
    rng = np.random.default_rng(seed)
    arrivals = np.cumsum(rng.exponential(1 / demand.rate, count)).tolist()
    prompts = _lengths(rng, demand.input_len, demand.spread, count)
    outputs = _lengths(rng, demand.output_len, demand.spread, count)
    return [
        Asked(at, length, max(round(length * (1 - demand.cached_share)), 1), tokens)
        for at, length, tokens in zip(arrivals, prompts, outputs, strict=True)
    ]


@dataclass(frozen=True)
class FleetTimes:
    """Times that clients of a fleet see: 95th percentiles, in seconds.

    Attributes:
        first: to the first token.
        gap: between two tokens.
        sequences: that a worker decodes in a step, on average.
    """

    first: float
    gap: float
    sequences: float


@dataclass(eq=False)
class _Job:
    """A request.

    Attributes:
        counts: its times are looked at.
        left: positions to compute.
        tokens: of the answer that are to come.
        last: when the token before came, or when it arrived.
        begun: a token has come.
    """

    counts: bool
    length: int
    left: int
    tokens: int
    last: float
    begun: bool = False


@dataclass(eq=False)
class _Worker:
    """One worker, and what it has to do."""

    prompts: deque[_Job] = field(default_factory=deque)
    decoded: list[tuple[int, int, _Job]] = field(default_factory=list)
    steps: int = 0
    pending: int = 0
    positions: int = 0
    running: bool = False

    @property
    def requests(self) -> int:
        return len(self.prompts) + len(self.decoded)

    @property
    def cost(self) -> float:
        """As the router counts it."""
        prefill, decode = _WEIGHTS.router_prefill_weight, _WEIGHTS.router_decode_weight
        return prefill * self.pending + decode * self.positions


@dataclass(eq=False)
class _Role:
    """Workers that do the same, and the requests that wait for room at one of them."""

    workers: list[_Worker]
    then: "_Role | None" = None
    waiting: deque[_Job] = field(default_factory=deque)


class PaperFleet:
    """So many workers of these times, for one run.

    Args:
        times: of each worker.
        workers: that decode, and where `prefill` is 0 compute prompts too.
        prefill: workers that compute prompts alone and hand all of them over.
        fetch_share: time of a position that is handed over, as a share of computing it.
    """

    def __init__(
        self, times: StepTimes, workers: int, prefill: int = 0, fetch_share: float = 0.0
    ) -> None:
        self._times = times
        decode = _Role([_Worker() for _ in range(workers)])
        self._roles = [decode]
        if prefill:
            self._roles.insert(0, _Role([_Worker() for _ in range(prefill)], then=decode))
        self._fetch = fetch_share * times.per_position
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._number = count()
        self._now = 0.0
        self._first: list[float] = []
        self._steps: list[tuple[float, int]] = []
        self._handed: list[tuple[float, int]] = []
        self._counts_from = 0.0

    def run(self, asked: Sequence[Asked]) -> FleetTimes:
        """Serve these requests."""
        self._counts_from = asked[int(len(asked) * WARM_UP)].at
        for one in asked:
            counts = one.at >= self._counts_from
            job = _Job(counts, one.length, one.computed, one.tokens, last=one.at)
            self._at(one.at, partial(self._arrive, self._roles[0], job))
        while self._events:
            self._now, _, act = heapq.heappop(self._events)
            act()
        first = float(np.percentile(self._first, 95)) + self._times.overhead
        sequences = [decoded for _, decoded in self._steps]
        return FleetTimes(first, _p95(self._steps + self._handed), float(np.mean(sequences or 0)))

    def _at(self, when: float, act: Callable[[], None]) -> None:
        heapq.heappush(self._events, (when, next(self._number), act))

    def _arrive(self, role: _Role, job: _Job) -> None:
        role.waiting.append(job)
        self._place(role)

    def _place(self, role: _Role) -> None:
        """Give waiting requests to workers with room."""
        while role.waiting:
            able = [one for one in role.workers if one.requests < self._times.max_num_seqs]
            if not able:
                return
            worker = min(able, key=lambda one: (one.cost, one.requests))
            job = role.waiting.popleft()
            worker.prompts.append(job)
            worker.pending += job.left
            self._begin(role, worker)

    def _begin(self, role: _Role, worker: _Worker) -> None:
        """Begin a worker's next step, if it is in none and has something to do."""
        if worker.running or not worker.requests:
            return
        times, room = self._times, self._times.max_num_batched_tokens
        computed: list[tuple[_Job, int]] = []
        for job in worker.prompts:
            if not room:
                break
            computed.append((job, min(job.left, room)))
            room -= computed[-1][1]
        seconds = (
            times.step
            + times.per_sequence * len(worker.decoded)
            + times.per_position * (times.max_num_batched_tokens - room)
        )
        worker.running = True
        self._at(self._now + seconds, partial(self._end, role, worker, seconds, computed))

    def _end(
        self, role: _Role, worker: _Worker, seconds: float, computed: list[tuple[_Job, int]]
    ) -> None:
        worker.running = False
        worker.steps += 1
        if worker.decoded and self._now >= self._counts_from:
            self._steps.append((seconds, len(worker.decoded)))
        while worker.decoded and worker.decoded[0][0] == worker.steps:
            worker.positions -= heapq.heappop(worker.decoded)[2].length
        for job, positions in computed:
            job.left -= positions
            worker.pending -= positions
            if not job.left:
                worker.prompts.popleft()
                self._say(role, worker, job)
        self._place(role)
        self._begin(role, worker)

    def _say(self, role: _Role, worker: _Worker, job: _Job) -> None:
        """A prompt is computed: a token of it is there, and the next come here or elsewhere."""
        if job.counts and job.begun:
            self._handed.append((self._now - job.last, 1))
        elif job.counts:
            self._first.append(self._now - job.last)
        job.begun, job.last, job.tokens = True, self._now, job.tokens - 1
        if not job.tokens:
            return
        if role.then is not None:
            # Its last position is computed again where it goes on.
            job.left = 1
            self._at(self._now + self._fetch * job.length, partial(self._arrive, role.then, job))
            return
        worker.positions += job.length
        heapq.heappush(worker.decoded, (worker.steps + job.tokens, next(self._number), job))


def _lengths(rng: np.random.Generator, mean: int, spread: float, size: int) -> list[int]:
    if spread < _NO_SPREAD:
        return [mean] * size
    drawn = rng.gamma(spread**-2, mean * spread**2, size)
    lengths: list[int] = np.maximum(np.rint(drawn), 1).astype(np.int64).tolist()
    return lengths


def _p95(weighed: Sequence[tuple[float, int]]) -> float:
    """The 95th percentile of values that each came so many times; 0 without any."""
    if not weighed:
        return 0.0
    values, counts = np.array(weighed).T
    order = np.argsort(values)
    reached = np.cumsum(counts[order])
    return float(values[order][np.searchsorted(reached, 0.95 * reached[-1])])
