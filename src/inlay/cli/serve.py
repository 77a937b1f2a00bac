"""`inlay serve`: a worker process, the plane to it, the router and the HTTP in front."""

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias
from urllib.parse import urlsplit

import inlay
from inlay.api import build_app
from inlay.base.errors import InlayError, InvalidRequestError
from inlay.base.pace import freeze_gc
from inlay.cli.engine_args import with_engine_args
from inlay.cli.model_directory import check_model
from inlay.cli.process import Console, on_signals, run_until_signal, waiting
from inlay.cli.settings import ServeSettings
from inlay.engine import check as check_engine
from inlay.engine.options import spec_of
from inlay.engine.ranks import Rank, ranks_of, tied
from inlay.engine.settings import EngineSettings
from inlay.engine.source import Served, plan_of
from inlay.engine.task import with_engine
from inlay.engine.vllm.connectors import transfer_config
from inlay.http.address import check_address
from inlay.http.serve import check, serve
from inlay.http.settings import FrontendSettings
from inlay.messages.card import EmbeddingCard, ModelCard
from inlay.messages.digest import Secret
from inlay.messages.request import Task
from inlay.router import Router
from inlay.store.settings import StoreSettings
from inlay.telemetry import Tracing, configure
from inlay.transport.local import LocalPlane, RoutedPlane
from inlay.transport.messages import Listen
from inlay.transport.tls import make_certificate
from inlay.worker import RestartGroup, Supervisor, starting
from inlay.worker.lora_modules import check_adapters

_ACCEPTING_SECONDS = 0.02


@dataclass(frozen=True)
class RunningServer:
    """A server that answers.

    Attributes:
        url: its base URL.
        card: of its model.
        stop: ends it when set, as Ctrl-C does.
    """

    url: str
    card: ModelCard
    stop: asyncio.Event


WhenReady: TypeAlias = Callable[[RunningServer], Awaitable[None]]
"""Runs beside the server once it answers; an error it raises ends the server."""


def run(settings: ServeSettings, extra_args: Sequence[str]) -> int:
    """Serve until a signal; return the exit status.

    Raises:
        UsageError: words for an engine that takes none.
        InlayError: the address is taken, or the worker did not start.
    """
    console = Console(sys.stdout, sys.stderr)
    settings = _with_extra_args(settings, extra_args)
    if settings.engine.library.connector:
        check_engine(settings.engine)
        stands_for = json.dumps(transfer_config(settings.engine))
        console.line(
            f"--connector {' '.join(settings.engine.library.connector)} is --kv-transfer-config "
            f"'{stands_for}'"
        )
    return run_host(settings, console)


def _with_extra_args(settings: ServeSettings, extra_args: Sequence[str]) -> ServeSettings:
    """Add the engine arguments: the words after `--`, and those that frontend flags imply."""
    meant = []
    if settings.frontend.enable_prompt_embeds:
        meant.append("--enable-prompt-embeds")
    if settings.frontend.scheduling_policy == "priority":
        meant.append("--scheduling-policy priority")
    return settings.model_copy(
        update={"engine": with_engine_args(settings.engine, extra_args, *meant)}
    )


def run_host(settings: ServeSettings, console: Console, when_ready: WhenReady | None = None) -> int:
    """`host` in an event loop of its own; the exit status."""
    configure(settings.telemetry.log_format, settings.telemetry.log_level)
    return run_until_signal(host(settings, console, when_ready))


async def host(
    settings: ServeSettings, console: Console, when_ready: WhenReady | None = None
) -> None:
    """Serve HTTP with a supervised worker behind it until a signal; then drain and end the worker.

    HTTP answers from the start; requests are accepted once the worker is ready.

    Raises:
        InlayError: the address is taken, there is no such model, the store cannot be opened, or the
            worker never became ready.
        CancelledError: a signal came before it was.
    """
    frontend = settings.frontend
    served = _served(settings)
    _check([one.engine for one in served], frontend)
    _tell_of(served, console)
    tracing = Tracing.open(settings.telemetry.otlp_traces_endpoint, "inlay-frontend")
    secret = settings.store.secret()
    _check_kept(served, settings.store)
    store = settings.store.open(secret)
    places = [(one, rank) for one in served for rank in ranks_of(one.engine, os.environ)]
    plane = LocalPlane() if len(places) == 1 else RoutedPlane()
    supervisors = _supervisors(settings, places, plane, secret)
    router = Router(plane, settings.router, secret=secret)
    app = build_app(
        router,
        frontend,
        secret=secret,
        store=store,
        tracing=tracing,
        batches=settings.batches,
        responses=settings.responses,
    )
    stop = asyncio.Event()
    answering: asyncio.Future[str] = asyncio.get_running_loop().create_future()

    async def announce() -> None:
        with waiting(console, f"loading {settings.engine.model.model}"):
            url = await answering
            # Of nearly all, before anybody waits: it takes 0.1 s. Then of the rest.
            freeze_gc()
            running = await _ready(plane, len(places), frontend, url, stop)
        freeze_gc()
        console.line(f"serving {_described(running.card, frontend)} at {running.url}")
        if when_ready is not None:
            await when_ready(running)

    def stopping(requests: int) -> None:
        if not plane.workers():
            console.line("stopping; no worker was ready")
            return
        console.line(
            f"stopping: {requests} request{'' if requests == 1 else 's'} open, up to "
            f"{frontend.drain_timeout:g} s; Ctrl-C again ends at once"
        )

    def kill() -> None:
        for supervisor in supervisors:
            supervisor.kill()

    drained = False
    await router.start()
    beside = [
        *(_beside(stop, supervisor.run()) for supervisor in supervisors),
        _beside(stop, announce()),
    ]
    try:
        drained = await serve(
            app, frontend, on_started=answering.set_result, on_stopping=stopping, stop=stop
        )
    finally:
        if not drained:
            kill()
        # A further signal must not wait for the worker to end either.
        on_signals(kill)
        for task in beside:
            task.cancel()
        results = await asyncio.gather(*beside, return_exceptions=True)
        await router.close()
        store.close()
        await plane.close()
    for result in results:
        if isinstance(result, Exception):
            raise result
    if any(supervisor.card is None for supervisor in supervisors):
        raise asyncio.CancelledError


def _check_kept(served: Sequence[Served], store: StoreSettings) -> None:
    """Raise `InvalidRequestError` if no later start could read what engines write to disk."""
    written = any(one.engine.kv.kv_offloading_dir is not None for one in served)
    if written and store.state_dir is None and store.secret_file is None:
        raise InvalidRequestError(
            "--kv-offloading-dir needs --state-dir or --secret-file: the files are encrypted with "
            "a key of the secret, which must be the same after a restart",
            param="kv_offloading_dir",
        )


def _supervisors(
    settings: ServeSettings,
    places: Sequence[tuple[Served, Rank]],
    plane: LocalPlane,
    secret: Secret,
) -> list[Supervisor]:
    """One supervisor for each rank of each engine."""
    together = RestartGroup() if tied(settings.engine) else None
    return [
        Supervisor(
            plane,
            starting(
                rank,
                secret,
                settings.telemetry,
                stage=one.stage,
                listen=None if one.stage is None else _loopback(),
            ),
            name=_name(one, number, len(places)),
            tied=together,
        )
        for number, (one, rank) in enumerate(places)
    ]


def _loopback() -> Listen:
    """Return where the stages of a pipeline ask each other for payloads."""
    return Listen("127.0.0.1", "127.0.0.1", 0, make_certificate(), 0, False)


def _name(one: Served, number: int, count: int) -> str:
    if one.stage is not None:
        return f"worker {number} of stage {one.stage.name}"
    return "worker" if count == 1 else f"worker of rank {number}"


def _served(settings: ServeSettings) -> list[Served]:
    """The engines to start: one, or those of a plan.

    Raises:
        InvalidRequestError: of a graph or deployment.
    """
    given = settings.engine
    source = plan_of(given.model.model, settings)
    if source is None:
        return [Served(with_engine(given))]
    return [
        one._replace(workers=1) for one in source.plan(given, settings) for _ in range(one.workers)
    ]


def _tell_of(served: Sequence[Served], console: Console) -> None:
    for engine, stage, _ in served:
        of = "" if stage is None else f"stage {stage.name}: "
        console.line(
            f"inlay {inlay.__version__}: {of}loading {engine.model.model} with the "
            f"{engine.model.engine} engine"
        )
    if any(one.engine.model.engine != "echo" for one in served):
        process = "engine process, which" if len(served) == 1 else "engine processes, which"
        verb = "imports" if len(served) == 1 else "import"
        library = spec_of(served[0].engine).title
        console.line(f"starting the {process} first {verb} {library}; this takes some seconds")


def _beside(stop: asyncio.Event, doing: Coroutine[object, object, None]) -> "asyncio.Task[None]":
    """A task whose failure ends the server."""

    def ended(task: "asyncio.Task[None]") -> None:
        if not task.cancelled() and task.exception() is not None:
            stop.set()

    task = asyncio.create_task(doing)
    task.add_done_callback(ended)
    return task


async def _ready(
    plane: LocalPlane, workers: int, frontend: FrontendSettings, url: str, stop: asyncio.Event
) -> RunningServer:
    """The server, once it takes connections and all its workers take requests."""
    await _accepting(frontend.host, urlsplit(url).port or frontend.port)
    while len(plane.workers()) < workers:
        await plane.changed()
    cards = [worker.card for worker in plane.workers()]
    return RunningServer(url, next((card for card in cards if not card.is_inner), cards[0]), stop)


def _check(engines: Sequence[EngineSettings], frontend: FrontendSettings) -> None:
    """Check at once what would otherwise fail after a process has started and a model is loaded.

    Raises:
        InvalidRequestError: an address, a file or the model cannot be used; all that cannot are
            named.
    """

    def admin_address() -> None:
        if frontend.admin_port is not None:
            check_address(frontend.admin_host, frontend.admin_port, options="admin-")

    def address() -> None:
        check_address(frontend.host, frontend.port)

    wrong: list[str] = []
    looks: list[Callable[[], object]] = [address, admin_address, partial(check, frontend)]
    for engine in engines:
        looks += [
            partial(check_engine, engine),
            partial(_check_whole, engine),
            partial(check_adapters, engine),
            partial(check_model, engine, renders=True),
        ]
    for look in looks:
        try:
            look()
        except InlayError as error:
            wrong.append(error.message)
    if wrong:
        raise InvalidRequestError("; ".join(wrong))


def _check_whole(engine: EngineSettings) -> None:
    """Raise `InvalidRequestError` for an engine that would do one phase of a request alone."""
    if engine.model.engine == "sglang" and engine.kv.role != "both":
        raise InvalidRequestError(
            f"--role {engine.kv.role} with SGLang is for workers of a fleet (inlay worker): alone "
            "it could answer nothing",
            param="role",
        )


async def _accepting(host: str, port: int) -> None:
    """Return once connections are accepted: the port is bound a moment before."""
    while True:
        try:
            _, writer = await asyncio.open_connection(host, port)
        except ConnectionRefusedError:
            await asyncio.sleep(_ACCEPTING_SECONDS)
        else:
            writer.close()
            return


def _described(card: ModelCard, frontend: FrontendSettings) -> str:
    embeds = (
        "accepted" if frontend.enable_prompt_embeds else "off, --enable-prompt-embeds turns them on"
    )
    if card.prompt_embeds is not None:
        embeds = f"refused: {card.prompt_embeds}"
    made = "" if card.embedding is None else f"makes {_made(card.embedding, card.tasks)}; "
    return (
        f"{card.name} ({card.dtype}, hidden size {card.hidden_size}, {card.limits.max_model_len} "
        "positions; "
        f"{made}embeddings as prompts {embeds})"
    )


def _made(card: EmbeddingCard, tasks: Sequence[Task]) -> str:
    if Task.SCORE in tasks:
        return "scores of pairs" if card.size == 1 else f"{card.size} classes"
    others = [each.name for each in card.outputs[1:]]
    first = card.outputs[0].name if card.outputs else "dense"
    what = "vectors" if first == "dense" else f"{first} vectors"
    return f"{what} of {card.size}" + (f", {' and '.join(others)}" if others else "")
