"""`inlay worker`: one engine in a fleet.

Two processes: this one talks to NATS, so that heartbeats never wait for a step; its child has the
engine, and frontends connect to that.
"""

import asyncio
import os
import sys
from collections.abc import Callable, Sequence
from contextlib import AsyncExitStack
from typing import Any, NamedTuple, NoReturn

import inlay
from inlay.cli.engine_args import with_engine_args
from inlay.cli.model_directory import check_model
from inlay.cli.process import Console, on_signals, run_until_signal
from inlay.cli.settings import WorkerSettings
from inlay.engine import check as check_engine
from inlay.engine.ranks import Rank, ranks_of, tied
from inlay.engine.settings import EngineSettings
from inlay.engine.source import plan_of
from inlay.engine.task import with_engine
from inlay.messages.card import Rollout, Stage
from inlay.messages.digest import Secret
from inlay.store.secret import read_key
from inlay.telemetry import configure
from inlay.transport.local import LocalPlane
from inlay.transport.messages import Listen
from inlay.transport.nats.member import Member
from inlay.transport.nats.references import ReferenceRecord
from inlay.transport.nats.worker import NatsWorker
from inlay.transport.tls import make_certificate
from inlay.worker import EngineProxy, RestartGroup, Supervisor, starting
from inlay.worker.health import health_port
from inlay.worker.lora_modules import check_adapters, read_modules
from inlay.worker.wanted_adapters import WantedAdapters

_EMBEDS = "--enable-prompt-embeds"


def run(settings: WorkerSettings, extra_args: Sequence[str]) -> int:
    """Serve the fleet until a signal; return the exit status.

    Raises:
        UsageError: words for an engine that takes none.
        InlayError: NATS is out of reach, the namespace has another secret, or the engine never
            became ready.
    """
    meant = [_EMBEDS] if settings.enable_prompt_embeds else []
    engine, stage = _engine(settings)
    engine = with_engine_args(engine, extra_args, *meant)
    check_engine(engine)
    # vLLM's own flag says the same.
    embeds = settings.enable_prompt_embeds or (
        engine.model.engine == "vllm" and _EMBEDS in engine.library.engine_arguments
    )
    settings = settings.model_copy(update={"engine": engine, "enable_prompt_embeds": embeds})
    configure(settings.telemetry.log_format, settings.telemetry.log_level)
    return run_until_signal(_host(settings, stage, Console(sys.stdout, sys.stderr)))


def _engine(settings: WorkerSettings) -> tuple[EngineSettings, Stage | None]:
    """Return the settings of the engine, and the stage that it is.

    Raises:
        InvalidRequestError: of a graph, its deployment or the stage.
    """
    given = settings.engine
    source = plan_of(given.model.model, settings)
    if source is None:
        return with_engine(given), None
    found = source.planned(given, settings)
    return found.engine, found.stage


async def _host(settings: WorkerSettings, stage: Stage | None, console: Console) -> None:
    check_adapters(settings.engine)
    if settings.adapters_file is not None:
        read_modules(settings.adapters_file)
    check_model(settings.engine)
    own = None if settings.secret_file is None else Secret(read_key(settings.secret_file))
    ranks = ranks_of(settings.engine, os.environ)
    together = RestartGroup() if tied(settings.engine) else None
    stop, at_once = asyncio.Event(), asyncio.Event()
    places: list[_RunningEngine] = []
    async with AsyncExitStack() as undo:
        await undo.enter_async_context(
            health_port(
                settings.transport_bind or settings.transport_host or "127.0.0.1",
                settings.health_port,
                lambda: len(places) == len(ranks) and all(place.worker.ready for place in places),
            )
        )
        places += [
            await _place(settings, stage, index, rank, own, together, stop.set, console, undo)
            for index, rank in enumerate(ranks)
        ]

        def stopping() -> None:
            (at_once if stop.is_set() else stop).set()

        on_signals(stopping)
        stopped = asyncio.create_task(stop.wait())
        running = [place.running for place in places]
        await asyncio.wait({stopped, *running}, return_when=asyncio.FIRST_COMPLETED)
        for task in running:
            if task.done():
                stopped.cancel()
                task.result()
        num_requests = sum([await place.worker.start_drain() for place in places])
        console.line(
            f"stopping: {num_requests} running request{'' if num_requests == 1 else 's'}, up to "
            f"{settings.drain_timeout:g} s; Ctrl-C again ends at once"
        )
        await asyncio.gather(
            *(_drain(place.worker, settings.drain_timeout, at_once) for place in places)
        )


class _RunningEngine(NamedTuple):
    """One engine of this process."""

    worker: NatsWorker
    running: "asyncio.Task[NoReturn]"


async def _place(
    settings: WorkerSettings,
    stage: Stage | None,
    index: int,
    rank: Rank,
    own: Secret | None,
    together: RestartGroup | None,
    on_drain: Callable[[], None],
    console: Console,
    undo: AsyncExitStack,
) -> _RunningEngine:
    """Join the fleet and start the engine of `rank`; `undo` ends both."""
    member = await Member.join(settings.fleet, "worker")
    undo.push_async_callback(member.leave)
    secret = await member.secret(own)
    record = ReferenceRecord(member, secret)
    member.keep(record.uphold)
    plane = LocalPlane(settle=record.settle)
    undo.push_async_callback(plane.close)
    start = starting(
        rank,
        secret,
        settings.telemetry,
        prompt_embeds=settings.enable_prompt_embeds,
        listen=_listen(settings, index),
        stage=stage,
    )
    supervisor = Supervisor(plane, start, tied=together)
    engine = EngineProxy(plane)
    worker = NatsWorker(
        member,
        engine,
        dial=engine.dial if settings.transport_dial else None,
        on_drain=on_drain,
        rollout=Rollout(min_workers=settings.min_workers, weight=settings.weight),
    )
    await worker.start()
    running = asyncio.create_task(supervisor.run())
    wanted = None
    if settings.adapters_file is not None:
        wanted = WantedAdapters(settings.adapters_file, engine.adapters, engine.call)
    # A model's only worker is not announced without an adapter that clients name.
    prepare = None if wanted is None else wanted.bring
    following = asyncio.create_task(engine.follow(worker.away, prepare))
    guarding = asyncio.create_task(engine.guard(supervisor.kill, settings.health_process_timeout))
    announcing = asyncio.create_task(_announced(worker, console))
    beside = [running, following, guarding, announcing]
    if wanted is not None:
        beside.append(asyncio.create_task(wanted.follow()))
    undo.push_async_callback(_end, *beside)
    # First of all in the end: running requests continue elsewhere, without an error that their
    # engine is gone.
    undo.push_async_callback(worker.close)
    served = settings.engine.model
    console.line(
        f"inlay {inlay.__version__}: {worker.id} in namespace {settings.fleet.namespace} at "
        f"{settings.fleet.shown_urls}: {'' if stage is None else f'stage {stage.name}: '}"
        f"loading {served.model} with the {served.engine} engine{_of(rank)}"
    )
    return _RunningEngine(worker, running)


def _listen(settings: WorkerSettings, index: int) -> Listen:
    """Return where the engine of that number takes requests."""
    host = settings.transport_host or settings.fleet.own_address()
    return Listen(
        host,
        settings.transport_bind or host,
        settings.transport_port and settings.transport_port + index,
        make_certificate(),
        settings.prompt_store_memory_bytes,
        settings.transport_dial,
    )


def _of(rank: Rank) -> str:
    number, size = (
        rank.settings.devices.data_parallel_rank,
        rank.settings.devices.data_parallel_size,
    )
    return "" if number is None else f", rank {number} of {size}"


async def _announced(worker: NatsWorker, console: Console) -> None:
    card = await worker.wait_announced()
    console.line(
        f"{worker.id} serves {card.name} ({card.dtype}, {card.limits.max_model_len} positions)"
    )


async def _drain(worker: NatsWorker, seconds: float, at_once: asyncio.Event) -> None:
    draining = asyncio.create_task(worker.drain(seconds))
    impatient = asyncio.create_task(at_once.wait())
    await asyncio.wait({draining, impatient}, return_when=asyncio.FIRST_COMPLETED)
    await _end(draining, impatient)


async def _end(*tasks: "asyncio.Task[Any]") -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
