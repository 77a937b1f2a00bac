"""The router's own code before workers that exist on paper.

Hit rates, waiting, and the messages it takes.

A trace of conversations that share long beginnings, half of them embeddings, comes to some
frontends, each with the pools, indexes and peers that a real one has, and goes to workers that are
a few numbers: a cache with least-recently-used eviction, prompts computed one after the other at a
fixed speed, outputs written side by side, each slower the more there are. Time is virtual; what the
router's code takes is measured in CPU time.

    python -m benchmarks.router_simulation [--workers N] [--requests N] [--policies NAME ...]
"""

import heapq
import sys
import time
from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import count
from random import Random
from typing import NamedTuple, Never

import msgspec

from benchmarks._options import parser_of
from inlay.messages.card import Limits, ModelCard
from inlay.messages.commands import WorkerCommand
from inlay.messages.digest import BLOCK_SIZE, Secret
from inlay.messages.prompt import ROW_DIGEST_SIZE, Buffer, Prompt, Rows, Tokens
from inlay.messages.request import Request
from inlay.messages.routing import (
    KEY_SIZE,
    FrontendLoad,
    KvEvents,
    Removed,
    Stored,
    WorkerLoad,
    routing_chain,
)
from inlay.router.decide import Ask, Placement, decide
from inlay.router.index import keys_of
from inlay.router.member import PoolMember
from inlay.router.peers import TELL_SECONDS, PeerLoads
from inlay.router.settings import RouterSettings
from inlay.router.snapshot import Pool
from inlay.transport.api import Stream

SECRET = Secret(bytes(32))
PREFILL = 8000.0
"""Positions of prompts a worker computes in a second."""
TOKEN_SECONDS = 0.02
"""From one output token to the next of a sequence that is alone.

Twice that with `SLOWED_BY` others.
"""
SLOWED_BY = 32
BUDGET = 2048
"""Positions of prompts in a step, beside one of every sequence that is decoded."""
NUM_SEQS = 64
POLICIES = ("kv", "kv without events", "round-robin", "least-loaded", "power-of-two", "oracle")


class SimulatedRequest(NamedTuple):
    """One request of the trace."""

    at: float
    prompt: Prompt
    output: int


def card(num_blocks: int, *, events: bool) -> ModelCard:
    return ModelCard(
        name="m", path="m", weights_id="w", dtype="float8_e4m3fn", vocab_size=1000, hidden_size=1,
        limits=Limits(max_model_len=100_000, max_num_seqs=NUM_SEQS), engine="paper", engine_version="1",
        block_size=BLOCK_SIZE, num_blocks=num_blocks, kv_events=events,
    )  # fmt: skip


def trace(requests: int, rate: float, apps: int, random: Random) -> list[SimulatedRequest]:
    """Conversations: an app's beginning (512 to 4096 positions, of every second app embeddings), then turns that grow.

    Apps are as popular as Zipf says; a conversation has three turns in the mean, five seconds
    apart.
    """
    beginnings: list[Prompt] = []
    for app in range(apps):
        length = random.choice((512, 1024, 2048, 4096))
        if app % 2:
            digests = random.randbytes(ROW_DIGEST_SIZE * length)
            rows = Rows(Buffer(bytes(length)), "float8_e4m3fn", (length, 1), digests=digests)
            beginnings.append(Prompt.of(rows))
        else:
            beginnings.append(Prompt.of(Tokens([random.randrange(1000) for _ in range(length)])))
    weights = [1 / (rank + 1) for rank in range(apps)]
    made: list[SimulatedRequest] = []
    now = 0.0
    while (
        len(made) < 1.5 * requests
    ):  # what is cut off is the end, where no new conversations begin
        now += random.expovariate(rate / 3)
        prompt = random.choices(beginnings, weights)[0]
        at = now
        while True:
            asked = [random.randrange(1000) for _ in range(random.randrange(32, 400))]
            prompt = prompt + Prompt.of(Tokens(asked))
            output = random.randrange(16, 256)
            made.append(SimulatedRequest(at, prompt, output))
            if random.random() < 1 / 3:
                break
            # The answer is part of the next turn's prompt.
            prompt = prompt + Prompt.of(Tokens([random.randrange(1000) for _ in range(output)]))
            at += 2 + random.expovariate(1 / 5)
    return sorted(made, key=lambda request: request.at)[:requests]


@dataclass
class Paper:
    """A worker on paper."""

    id: str
    card: ModelCard
    cache: "OrderedDict[int, None]" = field(default_factory=OrderedDict)
    free_at: float = 0.0
    running: int = 0
    stored: list[int] = field(default_factory=list)
    removed: list[int] = field(default_factory=list)
    sequence: int = 0

    def send(self, request: Request) -> Stream:
        raise NotImplementedError

    async def call(self, command: WorkerCommand[object], within: float = 30.0) -> Never:
        raise NotImplementedError

    def has(self, chain: list[int]) -> int:
        """Blocks of a chain in the cache, from the first on."""
        for number, key in enumerate(chain):
            if key not in self.cache:
                return number
        return len(chain)

    def wait(self, now: float, positions: int) -> float:
        """Seconds to the first token of a prompt of which so many positions must be computed, in steps of `BUDGET`."""
        slower = 1 + self.token_seconds * PREFILL / BUDGET
        return max(self.free_at - now, 0) + positions / PREFILL * slower + self.token_seconds

    @property
    def token_seconds(self) -> float:
        """From one output token to the next."""
        return TOKEN_SECONDS * (1 + self.running / SLOWED_BY)

    def take(self, chain: list[int]) -> None:
        """Compute a prompt: all of its blocks are in the cache then, as the most recent."""
        for key in reversed(chain):  # the beginning is what lasts
            if key in self.cache:
                self.cache.move_to_end(key)
            else:
                self.cache[key] = None
                self.stored.append(key)
        while len(self.cache) > self.card.num_blocks:
            self.removed.append(self.cache.popitem(last=False)[0])

    def events(self) -> KvEvents | None:
        """What has changed since the last time."""
        if not self.stored and not self.removed:
            return None
        self.sequence += 1
        told = KvEvents(self.sequence, (Stored(packed(self.stored)), Removed(packed(self.removed))))
        self.stored, self.removed = [], []
        return told


def packed(keys: list[int]) -> bytes:
    return b"".join([key.to_bytes(KEY_SIZE, "little") for key in keys])


class Frontend:
    """A frontend's routing, as it is, but for the plane."""

    def __init__(self, name: str, settings: RouterSettings, simulation: "Simulation") -> None:
        self.pool = Pool(settings, Random(name), simulation.time)
        self.peers = PeerLoads(
            simulation.publish, self._learn, self._routed, name=name, clock=simulation.time
        )
        for member in self.pool.take(simulation.workers, self.peers.load):
            self.peers.watch(member)

    def _learn(self, worker_id: str, load: WorkerLoad) -> None:
        self.pool.set_others(self.pool.members[worker_id], load)

    def _routed(self, worker_id: str, keys: object) -> None:
        self.pool.sent(self.pool.members[worker_id], keys)  # type: ignore[arg-type]

    def hear(self, worker_id: str, message: KvEvents) -> None:
        member = self.pool.members[worker_id]
        for event in message.events:
            if isinstance(event, Stored):
                self.pool.index.store(member.reported, keys_of(event.keys))
            elif isinstance(event, Removed):
                self.pool.index.remove(member.reported, keys_of(event.keys))


class Simulation:
    """Runs a trace under one policy."""

    def __init__(
        self,
        name: str,
        num_workers: int,
        num_blocks: int,
        num_frontends: int,
        weights: dict[str, float],
        event_seconds: float,
    ) -> None:
        self.now = 0.0
        self.event_seconds = event_seconds
        self.oracle = name == "oracle"
        self.events = name in ("kv", "oracle")
        policy = "kv" if self.oracle or name.startswith("kv") else name
        settings = RouterSettings.model_validate(
            {"router_policy": policy, "router_worker_backlog": 100.0, **weights}
        )
        made = card(num_blocks, events=self.events)
        self.workers = [Paper(f"worker-{n}", made) for n in range(num_workers)]
        self.by_id = {worker.id: worker for worker in self.workers}
        self.published: list[FrontendLoad] = []
        self.frontends = [Frontend(f"frontend-{n}", settings, self) for n in range(num_frontends)]
        self._queue: list[tuple[float, int, object]] = []
        self._numbers = count()
        self.waits: list[float] = []
        self.positions = self.hits = 0
        self.seen: set[int] = set()
        self.possible = 0
        self.deciding: list[float] = []
        self.chaining = self.hearing = 0.0
        self.load_messages = self.load_bytes = self.event_messages = self.event_bytes = 0
        self.most_running = 0

    def time(self) -> float:
        return self.now

    def publish(self, load: FrontendLoad) -> None:
        self.published.append(load)

    def at(self, when: float, what: object) -> None:
        heapq.heappush(self._queue, (when, next(self._numbers), what))

    def run(self, requests: list[SimulatedRequest]) -> None:
        """The whole trace."""
        turns = iter(Random(5).choices(self.frontends, k=len(requests)))
        end = requests[-1].at
        for request in requests:
            self.at(request.at, request)
        self.at(TELL_SECONDS, "tell")
        self.at(self.event_seconds, "events")
        while self._queue:
            self.now, _, what = heapq.heappop(self._queue)
            if isinstance(what, SimulatedRequest):
                self._request(next(turns), what)
            elif what == "tell":
                self._tell()
                if self.now < end:
                    self.at(self.now + TELL_SECONDS, "tell")
            elif what == "events":
                self._events()
                if self.now < end:
                    self.at(self.now + self.event_seconds, "events")
            elif isinstance(what, tuple):
                self._progress(*what)

    def _request(self, frontend: Frontend, request: SimulatedRequest) -> None:
        length = len(request.prompt)
        began = time.thread_time()
        chain = routing_chain(request.prompt, self.workers[0].card, SECRET)
        self.chaining += time.thread_time() - began
        keys = keys_of(chain)
        blocks = keys.tolist()
        began = time.thread_time()
        pool = frontend.pool
        ask = Ask(length, keys if pool.asks_for_chain(None) else None)
        placement = decide(pool.view(), ask)
        assert isinstance(placement, Placement)
        pool.last, part = placement.part.seat, placement.part
        member = pool.seated[part.seat]
        if self.oracle:
            member = pool.members[self._best(length, blocks).id]
        if pool.asks_for_chain(None):
            pool.sent(member, keys)
            frontend.peers.sent(member, keys)
        prefill = length - part.cached
        pool.change(member, requests=1, prefill=prefill)
        self.deciding.append(time.thread_time() - began)
        worker = self.by_id[member.id]
        cached = worker.has(blocks) * BLOCK_SIZE
        self.positions += length
        self.hits += cached
        new = next((n for n, key in enumerate(blocks) if key not in self.seen), len(blocks))
        self.possible += new * BLOCK_SIZE
        self.seen.update(blocks[new:])
        wait = worker.wait(self.now, length - cached)
        self.waits.append(wait)
        worker.free_at = self.now + wait
        worker.take(blocks)
        worker.running += 1
        self.most_running = max(self.most_running, worker.running)
        seconds = request.output * worker.token_seconds
        self.at(self.now + wait, (pool, member, prefill, length, False))
        self.at(self.now + wait + seconds, (pool, member, 0, length, True))

    def _best(self, length: int, blocks: list[int]) -> Paper:
        """Who has the first token soonest, of what is really so now."""
        return min(
            self.workers,
            key=lambda worker: (
                worker.wait(self.now, length - worker.has(blocks) * BLOCK_SIZE),
                worker.running,
            ),
        )

    def _progress(
        self, pool: Pool, member: PoolMember, prefill: int, length: int, ended: bool
    ) -> None:
        if not ended:
            pool.change(member, prefill=-prefill, decode=length)
            return
        pool.change(member, requests=-1, decode=-length)
        self.by_id[member.id].running -= 1

    def _tell(self) -> None:
        for frontend in self.frontends:
            frontend.peers.tell()
            for message in self.published:
                self.load_messages += 1
                self.load_bytes += len(msgspec.msgpack.encode(message))
                for other in self.frontends:
                    other.peers.take(message)
            self.published.clear()

    def _events(self) -> None:
        for worker in self.workers:
            message = worker.events()
            if message is None or not self.events:
                continue
            self.event_messages += 1
            self.event_bytes += len(msgspec.msgpack.encode(message))
            for frontend in self.frontends:
                began = time.thread_time()
                frontend.hear(worker.id, message)
                self.hearing += time.thread_time() - began


def lines(name: str, run: Simulation, seconds: float) -> Iterator[str]:
    waits, deciding = sorted(run.waits), sorted(run.deciding)
    number = len(waits)
    index = run.frontends[0].pool.index
    yield (
        f"{name:18} hit {run.hits / run.positions:6.1%} (of {run.possible / run.positions:.1%} that came before anywhere)  "
        f"first token mean {1000 * sum(waits) / number:6.0f} ms, p50 {1000 * waits[number // 2]:5.0f}, p99 {1000 * waits[int(number * 0.99)]:6.0f}  "
        f"most at one worker {run.most_running}"
    )
    yield (
        f"{'':18} decision p50 {1e6 * deciding[number // 2]:.0f} us, p99 {1e6 * deciding[int(number * 0.99)]:.0f}; chain "
        f"{1e6 * run.chaining / number:.0f} us; events {1e6 * run.hearing / max(1, run.event_messages) / len(run.frontends):.0f} us a message, "
        f"{run.hearing / len(run.frontends) / seconds:.1%} of a core; "
        f"index {index.nbytes / 1e6:.1f} MB, {index.num_sets} sets"
    )
    yield (
        f"{'':18} published: events {run.event_messages / seconds:.0f}/s, {run.event_bytes / seconds / 1e3:.0f} kB/s; "
        f"loads {run.load_messages / seconds:.1f}/s, {run.load_bytes / seconds / 1e3:.1f} kB/s; requests {number / seconds:.0f}/s"
    )


def main() -> None:
    parser = parser_of(__doc__)
    parser.add_argument("--workers", type=int, default=64)
    parser.add_argument(
        "--blocks", type=int, default=2048, help="of 16 positions, in each worker's cache"
    )
    parser.add_argument("--requests", type=int, default=20_000)
    parser.add_argument("--apps", type=int, default=400)
    parser.add_argument("--frontends", type=int, default=3)
    parser.add_argument(
        "--load",
        type=float,
        default=0.7,
        help="of what the workers could compute, were nothing cached",
    )
    parser.add_argument(
        "--event-seconds",
        type=float,
        default=0.1,
        help="a worker gathers what changed before it tells",
    )
    parser.add_argument("--prefill-weight", type=float)
    parser.add_argument("--decode-weight", type=float)
    parser.add_argument("--policies", nargs="*", default=POLICIES, choices=POLICIES)
    asked = parser.parse_args()
    random = Random(1)
    mean = sum(len(request.prompt) for request in trace(300, 1, asked.apps, Random(1))) / 300
    rate = asked.load * asked.workers * PREFILL / mean
    requests = trace(asked.requests, rate, asked.apps, random)
    print(
        f"{asked.workers} workers of {asked.blocks} blocks, {asked.frontends} frontends, {len(requests)} requests at {rate:.0f}/s, "
        f"mean prompt {sum(len(request.prompt) for request in requests) / len(requests):.0f} positions"
    )
    weights = {
        f"router_{name}": value
        for name, value in (
            ("prefill_weight", asked.prefill_weight),
            ("decode_weight", asked.decode_weight),
        )
        if value is not None
    }
    for name in asked.policies:
        run = Simulation(
            name, asked.workers, asked.blocks, asked.frontends, weights, asked.event_seconds
        )
        run.run(requests)
        for line in lines(name, run, requests[-1].at - requests[0].at):
            print(line)
        sys.stdout.flush()


if __name__ == "__main__":
    main()
