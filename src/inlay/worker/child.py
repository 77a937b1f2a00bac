"""The process of a worker, from its imports to its end."""

import asyncio
import gc
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Coroutine, Sequence
from contextlib import asynccontextmanager, suppress
from importlib import import_module
from pathlib import Path
from typing import TypeVar

from inlay import engine
from inlay.base import liveness
from inlay.base.errors import EngineError, ErrorFrame, InlayError
from inlay.base.pace import freeze_gc, importing
from inlay.engine import references
from inlay.engine.api import FailingEngine, HostMemoryUser, PeerUser
from inlay.engine.settings import EngineSettings
from inlay.messages.card import SelfCheck
from inlay.messages.digest import Secret
from inlay.telemetry import TelemetrySettings, Tracing, configure
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.local import Arena, LocalTransport
from inlay.transport.messages import Boot, Listen, SettledReference, ToWorker, WorkerFailed
from inlay.transport.peers import PeerConnections
from inlay.transport.serve import serve
from inlay.transport.tls import load_identity
from inlay.worker.fleet_references import FleetReferences
from inlay.worker.host import EngineHost, host_of
from inlay.worker.pool_check import check_later, check_pool

log = logging.getLogger(__name__)

T = TypeVar("T")

_SHARED_MEMORY = Path("/dev/shm")


def find_temporary_directory() -> None:
    """Set TMPDIR where none of the usual directories can be written: torch does not load then.

    Raises:
        EngineError: there is no other either.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        os.environ["TMPDIR"] = str(_SHARED_MEMORY)
        try:
            tempfile.gettempdir()
        except FileNotFoundError:
            raise EngineError(
                "no directory for temporary files can be written: set TMPDIR to one that can"
            ) from error
        log.warning(
            "no directory for temporary files can be written, so they take memory (%s): set TMPDIR "
            "to one that can",
            _SHARED_MEMORY,
        )


def import_ahead(libraries: Sequence[str]) -> Exception | None:
    """Import libraries that the engine will need; return why one could not be.

    A second try would give another reason, as half of it is there.
    """
    try:
        tempfile.gettempdir()
    except FileNotFoundError:  # said once lines are as they should be
        return None
    with importing():
        for library in libraries:
            try:
                import_module(library)
            except Exception as error:
                missing = isinstance(error, ModuleNotFoundError) and error.name == library
                return None if missing else error  # that it is not there says the engine
        gc.freeze()
    return None


async def run(
    connection: socket.socket,
    arena_fd: int,
    host_memory: int | None = None,
    *,
    failed: Exception | None = None,
) -> int:
    """Run the child process; return its exit status.

    Args:
        connection: to the process that started it.
        arena_fd: descriptor of the memory they share.
        host_memory: of memory that it shares with those before and after it, or None.
        failed: why its engine's library could not be imported, or None.
    """
    arena = Arena(os.fstat(arena_fd).st_size, arena_fd, places=False)
    channel: LocalTransport[ToWorker] = await LocalTransport.open(
        connection, arena, ToWorker, sends_shared=False
    )
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    try:
        boot = await channel.receive()
    except EOFError:
        return 1
    if not isinstance(boot, Boot):
        raise TypeError(f"the first message must be Boot, got {type(boot).__name__}")
    settings = EngineSettings.model_validate_json(boot.settings)
    telemetry = TelemetrySettings.model_validate_json(boot.telemetry)
    configure(telemetry.log_format, telemetry.log_level)
    try:
        find_temporary_directory()
        tracing = Tracing.open(telemetry.otlp_traces_endpoint, "inlay-worker")
        secret = Secret(boot.secret)
        if failed is not None:
            raise failed
        with importing():
            runner = engine.create(settings, secret)
            gc.freeze()  # of the engine's libraries, nothing is garbage while the model is loaded
        peers = PeerConnections(secret)
        if isinstance(runner, PeerUser):
            runner.use_peers(peers)
        if host_memory is not None and isinstance(runner, HostMemoryUser):
            runner.use_host_memory(host_memory)
        asking = None if boot.listen is None else FleetReferences(channel)
        if asking is not None:
            references.use(asking)
        self_check = await _while_awaited(
            _started(runner, settings.health.self_check, shared=asking is not None),
            channel,
            stop,
            asking,
        )
        cache = EmbedsCache(0 if boot.listen is None else boot.listen.cache_bytes, liveness.now)
        host = await host_of(
            runner,
            settings,
            secret,
            tracing,
            prompt_embeds=boot.prompt_embeds,
            embeds_cache=cache,
            stage=boot.stage,
            peers=peers,
            self_check=self_check,
        )
    except InlayError as error:
        return await _fail(channel, error)
    except Exception as error:
        log.exception("the engine did not start")
        return await _fail(
            channel, EngineError(f"the engine did not start: {type(error).__name__}: {error}")
        )
    await host.restore(boot.restore)
    freeze_gc()
    try:
        await host.first_probe()
        async with _listening(boot.listen, host, secret, cache) as endpoint:
            await _until_first(
                _serve(channel, host, endpoint, asking),
                stop.wait(),
                _failed(runner),
                host.probe(),
                host.watch_numbers(),
                check_later(runner, host, self_check, settings.health.self_check_interval),
            )
    except InlayError as error:
        return await _fail(channel, error)
    finally:
        await host.close()
        await runner.close()
        await peers.close()
        if tracing is not None:
            await asyncio.to_thread(tracing.close)
    return 0


def _serve(
    channel: LocalTransport[ToWorker],
    host: EngineHost,
    endpoint: Endpoint | None,
    asking: FleetReferences | None,
) -> Coroutine[object, object, None]:
    if endpoint is None or asking is None:
        return serve(channel, host)
    return serve(channel, host, endpoint.dial, asking.heard)


@asynccontextmanager
async def _listening(
    listen: Listen | None, host: EngineHost, secret: Secret, cache: EmbedsCache
) -> AsyncIterator[Endpoint | None]:
    """Take requests from other machines, if from any."""
    if listen is None:
        yield None
        return
    endpoint = Endpoint(host, secret, load_identity(listen.identity), cache)
    try:
        host.connects(
            None if listen.dials else await endpoint.open(listen.host, listen.bind, listen.port)
        )
    except OSError as error:
        raise EngineError(f"cannot listen on {listen.bind}:{listen.port}: {error}") from error
    try:
        yield endpoint
    finally:
        await endpoint.close()


async def _started(runner: engine.Engine, mode: str, *, shared: bool) -> SelfCheck | None:
    """Start the engine, and hold it to the reference of its pool; as `check_pool`."""
    await runner.start()
    return await check_pool(runner, mode, shared=shared)


async def _while_awaited(
    starting: Coroutine[object, object, T],
    channel: LocalTransport[ToWorker],
    stop: asyncio.Event,
    asking: FleetReferences | None,
) -> T:
    """Return what `starting` does; end the process at once when nobody waits for it any more."""
    begun = asyncio.create_task(starting)
    # Cancelled when nothing is asked any more, it leaves what has come.
    gone = asyncio.create_task(_hear_answers(channel, asking))
    stopping = asyncio.create_task(stop.wait())
    await asyncio.wait((begun, gone, stopping), return_when=asyncio.FIRST_COMPLETED)
    for task in (gone, stopping):
        task.cancel()
    await asyncio.gather(gone, stopping, return_exceptions=True)
    if begun.done():
        return begun.result()
    log.info("nobody waits for the engine any more")
    # A model that loads in a thread cannot be told to stop, and would hold up the end of the
    # process.
    logging.shutdown()
    os._exit(1)


async def _hear_answers(channel: LocalTransport[ToWorker], asking: FleetReferences | None) -> None:
    """Hand on the answers to what is asked before the worker is ready; anything else is the end."""
    while isinstance(answer := await channel.receive(), SettledReference) and asking is not None:
        asking.heard(answer)


async def _until_first(*doing: Coroutine[object, object, object]) -> None:
    """Run all until one has ended, then cancel the others. Raises what one of them raised."""
    tasks = [asyncio.create_task(coroutine) for coroutine in doing]
    await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in tasks:
        task.cancel()
    for result in await asyncio.gather(*tasks, return_exceptions=True):
        if isinstance(result, Exception):
            raise result


async def _failed(runner: engine.Engine) -> None:
    """Raise the reason once the engine has failed for good."""
    if not isinstance(runner, FailingEngine):
        await asyncio.Event().wait()
    else:
        raise await runner.failed()


async def _fail(channel: LocalTransport[ToWorker], error: InlayError) -> int:
    channel.send(WorkerFailed(ErrorFrame.of(error)))
    with suppress(EOFError):
        await channel.drain()
    channel.close()
    return 1
