"""A worker as a child process of this one."""

import asyncio
import os
import signal
import subprocess
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from types import MappingProxyType

from inlay.engine.ranks import Rank
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Stage
from inlay.messages.commands import AnyCommand
from inlay.messages.digest import Secret
from inlay.telemetry import TelemetrySettings
from inlay.transport.local import Arena, LocalTransport
from inlay.transport.local.arena import anonymous_file
from inlay.transport.messages import Boot, FromWorker, Listen
from inlay.worker.interpreter import Interpreter, interpreter
from inlay.worker.new_process import new_process

ARENA_BYTES = 256 * 1024 * 1024
FLEET_ARENA_BYTES = 1024 * 1024
"""Of a worker whose requests come over direct connections."""
STOP_SECONDS = 1.0
"""Seconds that a worker may take to end; it has no state to save."""

_LOOK_SECONDS = 0.01


class WorkerProcess:
    """A worker process this one started.

    Attributes:
        channel: the connection to it; a `LocalPlane` is made of such.
        pid: its process id.
    """

    def __init__(
        self,
        process: "subprocess.Popen[bytes]",
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
        return self._process.poll() is None

    @property
    def fate(self) -> str:
        """Description of its end, in words that follow "the worker process"."""
        status = self._process.poll()
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
                await self._ended()
        except TimeoutError:
            self.kill()
            await self._ended()
        self.kill()
        self._python.close()
        self.channel.arena.close()

    async def _ended(self) -> None:
        while self.alive:  # noqa: ASYNC110 - no event loop tells of a process it did not start
            await asyncio.sleep(_LOOK_SECONDS)


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
    arena = Arena(arena_bytes)
    given = telemetry or TelemetrySettings()
    new = new_process(
        settings,
        python,
        host="localhost" if listen is None else listen.host,
        environment=environment,
        log_format=given.log_format,
    )
    try:
        new.lend(arena.fd, *(() if host_memory is None else (host_memory,)))
        channel: LocalTransport[FromWorker] = await LocalTransport.open(
            new.connection, arena, FromWorker, sends_shared=True
        )
    except BaseException:
        new.end()
        raise
    # What nobody gave stays so: engines have defaults of their own.
    channel.send(
        Boot(
            settings.model_dump_json(exclude_unset=True),
            secret.root,
            tuple(restore),
            given.model_dump_json(),
            prompt_embeds,
            listen,
            stage,
        )
    )
    return WorkerProcess(new.process, channel, python)


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
