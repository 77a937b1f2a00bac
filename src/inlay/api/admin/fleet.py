"""`GET /workers`: the workers that a frontend knows, with their state and load."""

from typing import Literal

import msgspec

from inlay.http.metrics.engine_health import LastProbe, State, health_of
from inlay.http.server import Call
from inlay.messages.card import Phase, Stats
from inlay.messages.request import Task
from inlay.messages.routing import WorkerLoad
from inlay.transport.api import Worker


class WorkerLoads(msgspec.Struct, frozen=True):
    """Requests of all frontends at a worker: sequences, positions to prefill and being decoded."""

    requests: int
    prefill: int
    decode: int


class WorkerEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One worker: its model, its state and its load.

    Attributes:
        id: of the worker.
        model: served name of its model.
        state: of its health: "ok", "unprobed", "asleep", "failing" or "silent".
        tasks: what the model does.
        role: part of requests that it is meant for.
        asleep: level of its sleep, 0 while it is awake.
        running: sequences in the engine's steps; this and what follows is null if the worker did
            not answer.
        waiting: sequences that wait in the engine.
        prompt_tokens: positions of prompts so far.
        cached_tokens: those of them that were cached.
        steps: steps of the engine so far.
        leases: requests of which tensors are kept there for the next stage of a pipeline.
        held_payloads: those tensors.
        held_bytes: their bytes.
        fetched_payloads: tensors that came from stages before, so far.
        stage: "PIPELINE/STAGE" where it is a stage of a pipeline.
        load: what the frontends have sent there and is not done, in sequences and positions.
    """

    id: str
    model: str
    aliases: tuple[str, ...]
    state: State
    tasks: tuple[Task, ...]
    role: Phase
    engine: str
    dtype: str
    weights_id: str
    max_num_seqs: int
    asleep: int
    adapters: list[str]
    last_probe: LastProbe | None
    running: int | None
    waiting: int | None
    blocks_used: int | None
    blocks_total: int | None
    prompt_tokens: int | None
    cached_tokens: int | None
    generated_tokens: int | None
    steps: int | None
    leases: int | None
    held_payloads: int | None
    held_bytes: int | None
    fetched_payloads: int | None
    stage: str | None
    load: WorkerLoads


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """All workers that this frontend knows.

    Attributes:
        drains: True if `/drain` is taken: these are workers of a fleet.
        missing: workers that should be ready and are not, with the reason.
        waiting: requests that wait in this frontend for a worker with room, by model.
    """

    object: Literal["list"] = "list"
    data: list[WorkerEntry]
    drains: bool
    missing: dict[str, str]
    waiting: dict[str, int]


async def list_workers(call: Call) -> None:
    """Answer with what is known of every worker, and with what it says itself within a second."""
    server, router = call.server, call.server.router
    await server.engines.refresh()
    stats, loads = server.engines.stats(), router.loads()
    entries = [
        _entry(worker, stats.get(worker.id), loads.get(worker.id, WorkerLoad()))
        for worker in router.ready()
    ]
    entries.sort(key=lambda entry: (entry.model, entry.id))
    missing = dict(router.unavailable())
    await call.json(
        WorkerList(
            data=entries,
            drains=router.drains() is not None,
            missing=missing,
            waiting=router.waiting(),
        )
    )


_COUNTED = tuple(set(Stats.__struct_fields__) & set(WorkerEntry.__struct_fields__))
"""Fields that an entry has from the worker's counters; null where it did not answer."""


def _entry(worker: Worker, stats: Stats | None, load: WorkerLoad) -> WorkerEntry:
    card, health = worker.card, health_of(worker)
    return WorkerEntry(
        id=worker.id,
        model=card.name,
        aliases=card.aliases,
        state=health.state,
        tasks=card.tasks,
        role=card.phase,
        engine=f"{card.engine} {card.engine_version}",
        dtype=card.dtype,
        weights_id=card.weights_id,
        max_num_seqs=card.limits.max_num_seqs,
        asleep=card.asleep,
        adapters=[adapter.name for adapter in card.adapters],
        last_probe=health.last_probe,
        stage=None if card.stage is None else f"{card.stage.graph.name}/{card.stage.name}",
        load=WorkerLoads(load.requests, load.prefill, load.decode),
        **{name: None if stats is None else getattr(stats, name) for name in _COUNTED},
    )
