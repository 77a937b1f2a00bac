"""`GET /workers`: the workers that a frontend knows, with their state and load."""

from typing import Annotated, Literal

import msgspec

from inlay.http.metrics.engine_health import LastProbe, State, health_of
from inlay.http.server import Call
from inlay.messages.card import Phase, Stats
from inlay.messages.fields import example, field
from inlay.messages.request import Task
from inlay.messages.routing import WorkerLoad
from inlay.router.shares import Weights
from inlay.transport.api import Worker


class WorkerLoads(msgspec.Struct, frozen=True):
    """Requests of all frontends at a worker: sequences, positions to prefill and being decoded."""

    requests: Annotated[int, field("sequences.", 3)]
    prefill: Annotated[int, field("positions of prompts that are still to be computed.", 2048)]
    decode: Annotated[int, field("positions of the sequences that are being decoded.", 900)]


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

    id: Annotated[str, example("w-5d0f")]
    model: Annotated[str, example("my-model")]
    aliases: Annotated[tuple[str, ...], field("other names of its model.", ["my-other-name"])]
    state: State
    tasks: tuple[Task, ...]
    role: Phase
    engine: Annotated[str, field("engine and its version.", "torch 2.9.0")]
    dtype: Annotated[str, field("dtype that the model computes in.", "bfloat16")]
    weights_id: Annotated[str, field("identity of configuration and weights.", "9f86d081884c7d65")]
    share: Annotated[float, field("part of its model's requests that its weights get.", 0.05)]
    max_num_seqs: Annotated[int, field("sequences that it computes at a time.", 64)]
    asleep: Annotated[int, example(0)]
    adapters: Annotated[list[str], field("names of its loaded adapters.", ["my-adapter"])]
    last_probe: Annotated[LastProbe | None, field("last probe of its engine.")]
    running: Annotated[int | None, example(3)]
    waiting: Annotated[int | None, example(2)]
    blocks_used: Annotated[int | None, field("blocks of its cache that are in use.", 40)]
    blocks_total: Annotated[int | None, field("blocks of its cache.", 512)]
    prompt_tokens: Annotated[int | None, example(17)]
    cached_tokens: Annotated[int | None, example(16)]
    generated_tokens: Annotated[int | None, field("tokens made so far.", 8000)]
    steps: Annotated[int | None, example(12000)]
    leases: Annotated[int | None, example(0)]
    held_payloads: Annotated[int | None, example(0)]
    held_bytes: Annotated[int | None, example(0)]
    fetched_payloads: Annotated[int | None, example(0)]
    stage: Annotated[str | None, example("my-pipeline/denoise")]
    load: WorkerLoads


class WorkerList(msgspec.Struct, frozen=True, kw_only=True):
    """All workers that this frontend knows.

    Attributes:
        drains: True if `/drain` is taken: these are workers of a fleet.
        missing: workers that should be ready and are not, with the reason.
        waiting: requests that wait in this frontend for a worker with room, by model.
    """

    object: Literal["list"] = "list"
    data: Annotated[list[WorkerEntry], field("the entries.")]
    drains: bool
    missing: Annotated[dict[str, str], example({"my-model": "it has not loaded yet"})]
    waiting: Annotated[dict[str, int], example({"my-model": 2})]


async def list_workers(call: Call) -> None:
    """Answer with what is known of every worker, and with what it says itself within a second."""
    server, router = call.server, call.server.router
    await server.engines.refresh()
    stats, loads = server.engines.stats(), router.loads()
    shares = router.shares()
    entries = [
        _entry(
            worker,
            shares.get(worker.card.name, {}).get(Weights.of(worker.card), 0.0),
            stats.get(worker.id),
            loads.get(worker.id, WorkerLoad()),
        )
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


def _entry(worker: Worker, share: float, stats: Stats | None, load: WorkerLoad) -> WorkerEntry:
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
        share=share,
        max_num_seqs=card.limits.max_num_seqs,
        asleep=card.asleep,
        adapters=[adapter.name for adapter in card.adapters],
        last_probe=health.last_probe,
        stage=None if card.stage is None else f"{card.stage.whole}/{card.stage.name}",
        load=WorkerLoads(load.requests, load.prefill, load.decode),
        **{name: None if stats is None else getattr(stats, name) for name in _COUNTED},
    )
