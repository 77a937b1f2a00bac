"""Starting a worker as a child process, and what runs in it."""

import asyncio
import gc
import logging
import os
import signal
import socket
import tempfile
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import TypeVar

from inlay import engine
from inlay.base import liveness
from inlay.base.errors import EngineError, ErrorFrame, InlayError
from inlay.base.pace import freeze_gc
from inlay.engine import references
from inlay.engine.api import FailingEngine, HostMemoryUser, PeerUser
from inlay.engine.ranks import Rank
from inlay.engine.settings import EngineSettings
from inlay.messages.card import SelfCheck, Stage
from inlay.messages.commands import AnyCommand
from inlay.messages.digest import Secret
from inlay.telemetry import TelemetrySettings, Tracing, configure
from inlay.telemetry.logs import FORMAT_VARIABLE
from inlay.transport.embeds_cache import EmbedsCache
from inlay.transport.endpoint import Endpoint
from inlay.transport.local import Arena, LocalTransport
from inlay.transport.local.arena import anonymous_file
from inlay.transport.messages import (
    Boot,
    FromWorker,
    Listen,
    SettledReference,
    ToWorker,
    WorkerFailed,
)
from inlay.transport.peers import PeerConnections
from inlay.transport.serve import serve
from inlay.transport.tls import load_identity
from inlay.worker.fleet_references import FleetReferences
from inlay.worker.host import EngineHost, host_of
from inlay.worker.interpreter import Interpreter, interpreter
from inlay.worker.pool_check import check_later, check_pool

log = logging.getLogger(__name__)

T = TypeVar("T")

ARENA_BYTES = 256 * 1024 * 1024
FLEET_ARENA_BYTES = 1024 * 1024
"""Of a worker whose requests come over direct connections."""
_SHARED_MEMORY = Path("/dev/shm")
STOP_SECONDS = 1.0
"""Seconds that a worker may take to end; it has no state to save."""


class WorkerProcess:
    """A worker process this one started.

    Attributes:
        channel: the connection to it; a `LocalPlane` is made of such.
        pid: its process id.
    """

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        channel: LocalTransport[FromWorker],
        python: Interpreter,
    ) -> None:
        self._process = process
        self._python = python
        self.channel = channel

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """True while it runs."""
        return self._process.returncode is None

    @property
    def fate(self) -> str:
        """Description of its end, in words that follow "the worker process"."""
        status = self._process.returncode
        if status is None:
            return "runs"
        if status < 0:
            return f"was killed by {signal.Signals(-status).name}"
        return f"ended with status {status}"

    def kill(self) -> None:
        """End the process, and those it started, without waiting for what they do.

        `close` is still to be called.
        """
        # An engine's own processes are in its group, and may outlive it.
        with suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)

    async def close(self) -> None:
        """End the process: it stops when its connection closes, and is killed if it does not.

        What it started and left behind is killed with it.
        """
        self.channel.close()
        try:
            async with asyncio.timeout(STOP_SECONDS):
                await self._process.wait()
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self.kill()
        self._python.close()
        self.channel.arena.close()


async def spawn(
    settings: EngineSettings,
    secret: Secret,
    *,
    arena_bytes: int = ARENA_BYTES,
    restore: Sequence[AnyCommand] = (),
    telemetry: TelemetrySettings | None = None,
    environment: Mapping[str, str] = MappingProxyType({}),
    prompt_embeds: bool = True,
    listen: Listen | None = None,
    stage: Stage | None = None,
    host_memory: int | None = None,
) -> WorkerProcess:
    """Start a worker process for `settings`.

    It loads its model meanwhile: `LocalPlane.wait_ready` says when it can work.

    Args:
        settings: of the engine.
        secret: of the namespace.
        arena_bytes: memory for prompts, shared with it.
        restore: commands it runs before it is ready.
        telemetry: how it logs, and where its spans go.
        environment: variables it is to have beside what it inherits and its engine needs.
        prompt_embeds: whether clients may send embeddings as prompts.
        listen: where it takes requests from other machines, if from any.
        stage: of a pipeline that it is, or None.
        host_memory: descriptor of memory that it shares with those before and after it, or None.

    Raises:
        InvalidRequestError: it cannot run in the Python the settings name.
    """
    python = await interpreter(settings.library.engine_python)
    ours, theirs = socket.socketpair()
    arena = Arena(arena_bytes)
    lent = () if host_memory is None else (host_memory,)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(
                python.path,
                "-m",
                "inlay.worker",
                str(theirs.fileno()),
                str(arena.fd),
                str(arena_bytes),
                *map(str, lent),
            ),
            pass_fds=(theirs.fileno(), arena.fd, *lent),
            env={
                **os.environ,
                **engine.environment(
                    settings, os.environ, "localhost" if listen is None else listen.host
                ),
                **python.environment(os.environ),
                **environment,
                FORMAT_VARIABLE: "text" if telemetry is None else telemetry.log_format,
            },
            stdin=asyncio.subprocess.DEVNULL,
            # Its own session: Ctrl-C in a terminal is for the frontend, which drains before it lets
            # the worker go.
            start_new_session=True,
        )
    channel: LocalTransport[FromWorker] = await LocalTransport.open(
        ours, arena, FromWorker, sends_shared=True
    )
    # What nobody gave stays so: engines have defaults of their own.
    told = (telemetry or TelemetrySettings()).model_dump_json()
    channel.send(
        Boot(
            settings.model_dump_json(exclude_unset=True),
            secret.root,
            tuple(restore),
            told,
            prompt_embeds,
            listen,
            stage,
        )
    )
    return WorkerProcess(process, channel, python)


def starting(
    rank: Rank,
    secret: Secret,
    telemetry: TelemetrySettings,
    *,
    prompt_embeds: bool = True,
    listen: Listen | None = None,
    stage: Stage | None = None,
) -> Callable[[Sequence[AnyCommand]], Awaitable[WorkerProcess]]:
    """Return a function that starts a process for `rank`, which first runs the commands given.

    Arguments as `spawn`'s.
    """
    size = rank.settings.kv.kv_offloading_bytes
    # Of the rank, not of a process: a later one finds what was kept.
    host_memory = anonymous_file(size) if size else None

    def start(restore: Sequence[AnyCommand]) -> Awaitable[WorkerProcess]:
        return spawn(
            rank.settings,
            secret,
            arena_bytes=ARENA_BYTES if listen is None else FLEET_ARENA_BYTES,
            restore=restore,
            telemetry=telemetry,
            environment=rank.environment,
            prompt_embeds=prompt_embeds,
            listen=listen,
            stage=stage,
            host_memory=host_memory,
        )

    return start


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


async def run(
    socket_fd: int, arena_fd: int, arena_bytes: int, host_memory: int | None = None
) -> int:
    """Run the child process; return its exit status."""
    arena = Arena(arena_bytes, arena_fd)
    channel: LocalTransport[ToWorker] = await LocalTransport.open(
        socket.socket(fileno=socket_fd), arena, ToWorker, sends_shared=False
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
