"""`inlay serve`: a worker process, the plane to it, the router and the HTTP in front."""

import asyncio
import logging
import signal
import socket
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import TypeAlias
from urllib.parse import urlsplit

import uvloop

import inlay
from inlay.cli.command import UsageError
from inlay.cli.console import Console
from inlay.cli.settings import ServeSettings
from inlay.engine.settings import EngineSettings
from inlay.errors import InvalidRequestError, OverloadedError
from inlay.frontend import build_app, check, serve
from inlay.frontend.settings import FrontendSettings
from inlay.plane.local import LocalPlane
from inlay.protocol.work import ModelCard, Plane
from inlay.router import Router
from inlay.tensors.hub import local_directory
from inlay.tensors.table import config_of
from inlay.worker import spawn

EXIT_INTERRUPTED = 130
_ACCEPTING_SECONDS = 0.02


@dataclass(frozen=True)
class Running:
    """A server that answers.

    Attributes:
        url: its base URL.
        card: of its model.
        stop: ends it when set, as Ctrl-C does.
    """

    url: str
    card: ModelCard
    stop: asyncio.Event


WhenReady: TypeAlias = Callable[[Running], Awaitable[None]]
"""Runs beside the server once it answers; an error it raises ends the server."""


def run(settings: ServeSettings, rest: Sequence[str]) -> int:
    """Serve until told to stop; the exit status.

    Raises:
        UsageError: words for an engine that takes none.
        InlayError: the address is taken, or the worker did not start.
    """
    if rest:
        raise UsageError(
            f"the {settings.engine.engine} engine takes no further arguments, got {' '.join(rest)!r} after --"
        )
    return run_host(settings, Console(sys.stdout, sys.stderr))


def run_host(settings: ServeSettings, console: Console, when_ready: WhenReady | None = None) -> int:
    """`host` in an event loop of its own; the exit status."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    # Its lines about starting and stopping say what ours say.
    logging.getLogger("uvicorn").setLevel(logging.WARNING)
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            runner.run(host(settings, console, when_ready))
    except asyncio.CancelledError:
        return EXIT_INTERRUPTED
    return 0


async def host(settings: ServeSettings, console: Console, when_ready: WhenReady | None = None) -> None:
    """Start a worker, serve HTTP in front of it until a signal comes, drain, and end the worker.

    Raises:
        InlayError: the address is taken, there is no such model, the store cannot be opened, the worker did not start, or it ended while it was
            needed.
    """
    engine, frontend = settings.engine, settings.frontend
    _check(engine, frontend)
    # Until the server takes signals over. SIGINT too: a shell starts background jobs with it ignored, and then asyncio leaves it so.
    main = asyncio.current_task()
    if main is not None:
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, main.cancel)
    console.line(f"inlay {inlay.__version__}: loading {engine.model} with the {engine.engine} engine")
    secret = settings.store.secret()
    store = settings.store.open(secret) if frontend.enable_prompt_embeds else None
    worker = await spawn(engine, secret)
    plane = LocalPlane([worker.channel])
    drained = False
    try:
        await plane.start()
        app = build_app(Router(plane), frontend, secret=secret, store=store)
        await plane.wait_ready()
        card = plane.workers()[0].card
        stop = asyncio.Event()
        beside = [asyncio.create_task(_until_gone(plane, stop))]

        async def ready(url: str) -> None:
            await _accepting(frontend.host, urlsplit(url).port or frontend.port)
            console.line(f"serving {_described(card, frontend)} at {url}")
            if when_ready is not None:
                try:
                    await when_ready(Running(url, card, stop))
                except Exception:
                    stop.set()
                    raise

        def started(url: str) -> None:
            beside.append(asyncio.create_task(ready(url)))

        def stopping(requests: int) -> None:
            console.line(
                f"stopping: {requests} request{'' if requests == 1 else 's'} open, up to {frontend.drain_timeout:g} s; Ctrl-C again ends at once"
            )

        try:
            drained = await serve(app, frontend, on_started=started, on_stopping=stopping, stop=stop)
        finally:
            for task in beside:
                task.cancel()
            ended = await asyncio.gather(*beside, return_exceptions=True)
        for result in ended:
            if isinstance(result, Exception):
                raise result
    finally:
        if not drained:
            worker.kill()
        # Whoever is impatient while the worker ends need not wait for it either.
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, worker.kill)
        if store is not None:
            store.close()
        await plane.close()
        await worker.close()


def _check(engine: EngineSettings, frontend: FrontendSettings) -> None:
    """Say at once what would otherwise be found out when a process has started and a model is loaded.

    Raises:
        InvalidRequestError: an address, a file or the model cannot be used.
    """
    check_address(frontend.host, frontend.port)
    if frontend.admin_port is not None:
        check_address(frontend.admin_host, frontend.admin_port)
    check(frontend)
    directory = local_directory(engine.model)
    if directory is not None:
        config_of(directory)


def check_address(host: str, port: int) -> None:
    """Say now, before a model is loaded for it, that an address cannot be listened on.

    Raises:
        InvalidRequestError: it cannot; the message says why.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
    except OSError as error:
        raise InvalidRequestError(f"cannot listen on {host}:{port}: {error.strerror}") from error


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


async def _until_gone(plane: Plane, stop: asyncio.Event) -> None:
    """Stop the server when its only worker is gone: whoever supervises the process starts it afresh.

    Raises:
        OverloadedError: it is gone.
    """
    while plane.workers():
        await plane.changed()
    stop.set()
    raise OverloadedError("the worker process ended; its own output above says why")


def _described(card: ModelCard, frontend: FrontendSettings) -> str:
    embeds = "accepted" if frontend.enable_prompt_embeds else "off, --enable-prompt-embeds turns them on"
    if card.prompt_embeds is not None:
        embeds = f"refused: {card.prompt_embeds}"
    return (
        f"{card.name} ({card.dtype}, hidden size {card.hidden_size}, {card.limits.max_model_len} positions; "
        f"embeddings {embeds})"
    )
