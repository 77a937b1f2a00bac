"""Starting a worker as a child process, and what runs in it."""

import asyncio
import logging
import os
import signal
import socket
import sys

from inlay import engine
from inlay.digest import Secret
from inlay.engine.settings import EngineSettings
from inlay.errors import EngineError, ErrorFrame, InlayError
from inlay.plane.local import Arena, Channel, serve
from inlay.plane.messages import Boot, Failed, FromWorker, ToWorker
from inlay.protocol.work import Fails
from inlay.worker.host import Host

log = logging.getLogger(__name__)

ARENA_BYTES = 256 * 1024 * 1024
STOP_SECONDS = 1.0
"""What a worker gets to end in once nothing is asked of it; it has no state to save."""


class WorkerProcess:
    """A worker process this one started.

    Attributes:
        channel: the connection to it; a `LocalPlane` is made of such.
        pid: its process id.
    """

    def __init__(self, process: asyncio.subprocess.Process, channel: Channel[FromWorker]) -> None:
        self._process = process
        self.channel = channel

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether it runs."""
        return self._process.returncode is None

    def kill(self) -> None:
        """End the process without waiting for what it does; `close` is still to be called."""
        if self.alive:
            self._process.kill()

    async def close(self) -> None:
        """End the process: it stops when its connection closes, and is killed when it has not within seconds."""
        self.channel.close()
        try:
            await asyncio.wait_for(self._process.wait(), STOP_SECONDS)
        except TimeoutError:
            self.kill()
            await self._process.wait()
        self.channel.arena.close()


async def spawn(settings: EngineSettings, secret: Secret, *, arena_bytes: int = ARENA_BYTES) -> WorkerProcess:
    """Start a worker process for `settings`. It loads its model meanwhile: `LocalPlane.wait_ready` says when it can work."""
    ours, theirs = socket.socketpair()
    arena = Arena(arena_bytes)
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-m", "inlay.worker", str(theirs.fileno()), str(arena.fd), str(arena_bytes)),
            pass_fds=(theirs.fileno(), arena.fd),
            env={**os.environ, **engine.environment(settings, os.environ)},
            stdin=asyncio.subprocess.DEVNULL,
            # Its own session: Ctrl-C in a terminal is for the frontend, which drains before it lets the worker go.
            start_new_session=True,
        )
    channel: Channel[FromWorker] = await Channel.open(ours, arena, FromWorker, sends_shared=True)
    channel.send(Boot(settings.model_dump_json(), secret.root))
    return WorkerProcess(process, channel)


async def run(socket_fd: int, arena_fd: int, arena_bytes: int) -> int:
    """What the child process does; its exit status."""
    arena = Arena(arena_bytes, arena_fd)
    channel: Channel[ToWorker] = await Channel.open(
        socket.socket(fileno=socket_fd), arena, ToWorker, sends_shared=False
    )
    boot = await channel.receive()
    if not isinstance(boot, Boot):
        raise TypeError(f"the first message must be Boot, got {type(boot).__name__}")
    settings = EngineSettings.model_validate_json(boot.settings)
    stop = asyncio.Event()
    asyncio.get_running_loop().add_signal_handler(signal.SIGTERM, stop.set)
    runner: engine.Engine | None = None
    try:
        runner = engine.create(settings, Secret(boot.secret))
        await runner.start()
    except InlayError as error:
        return await _fail(channel, error)
    except Exception as error:
        log.exception("the engine did not start")
        return await _fail(channel, EngineError(f"the engine did not start: {type(error).__name__}: {error}"))
    serving = asyncio.create_task(serve(channel, Host(runner)))
    stopping = asyncio.create_task(stop.wait())
    failing = asyncio.create_task(_failed(runner))
    await asyncio.wait((serving, stopping, failing), return_when=asyncio.FIRST_COMPLETED)
    if failing.done():
        # What its works were told last is still to leave.
        await channel.drain()
    for task in (serving, stopping, failing):
        task.cancel()
    results = await asyncio.gather(serving, stopping, failing, return_exceptions=True)
    await runner.close()
    for result in results:
        if isinstance(result, Exception):
            raise result
    return 0


async def _failed(runner: engine.Engine) -> None:
    """Raise the reason once the engine has failed for good."""
    if not isinstance(runner, Fails):
        await asyncio.Event().wait()
    else:
        raise await runner.failed()


async def _fail(channel: Channel[ToWorker], error: InlayError) -> int:
    channel.send(Failed(ErrorFrame.of(error)))
    await channel.drain()
    channel.close()
    return 1
