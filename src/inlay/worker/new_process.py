"""The process of a worker before it is told what to serve.

It imports what any engine of its kind needs meanwhile. A command starts one as early as it can
(`begun_ahead`); it is taken where just such a one is to be started.
"""

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from types import MappingProxyType

from inlay import engine
from inlay.base.errors import InlayError
from inlay.engine.options import spec_of
from inlay.engine.settings import EngineSettings
from inlay.telemetry import TelemetrySettings
from inlay.telemetry.logs import FORMAT_VARIABLE
from inlay.worker.interpreter import Interpreter

_AHEAD = ("torch",)
"""Libraries that are imported before the model was checked: others may write lines meanwhile."""


@dataclass(frozen=True)
class _Start:
    """All that tells one new process from another."""

    words: tuple[str, ...]
    environment: Mapping[str, str]


@dataclass(frozen=True)
class NewProcess:
    """A process that waits for what it shares with this one, and then for `Boot`.

    It ends at once where this one ends first, or closes the connection.

    Attributes:
        start: what it was started with.
        process: itself.
        connection: to it; a blocking socket.
    """

    start: _Start
    process: "subprocess.Popen[bytes]"
    connection: socket.socket

    @classmethod
    def begin(cls, start: _Start) -> "NewProcess":
        """Start one; raises `OSError`."""
        ours, theirs = socket.socketpair()
        python, *words = start.words
        with theirs:
            process = subprocess.Popen(
                [python, "-m", "inlay.worker", str(theirs.fileno()), *words],
                pass_fds=(theirs.fileno(),),
                env=start.environment,
                stdin=subprocess.DEVNULL,
                # Its own session: Ctrl-C in a terminal is for the frontend, which drains before it
                # lets the worker go.
                start_new_session=True,
            )
        return cls(start, process, ours)

    def lend(self, *descriptors: int) -> None:
        """Give it descriptors; messages may follow. That it has ended shows where they are read."""
        with suppress(ConnectionError):
            socket.send_fds(self.connection, [b"\0"], descriptors)

    def end(self) -> None:
        """End it, and what it has started; return once it is gone."""
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        self.connection.close()


_ahead: list[NewProcess] = []
"""The one that was started before it was asked for, if any."""


@contextmanager
def begun_ahead(settings: EngineSettings, telemetry: TelemetrySettings) -> Iterator[None]:
    """Start the process of an engine's first worker; end it after the block if nobody took it.

    What is wrong with the settings is said by whoever checks them.
    """
    try:
        if settings.library.engine_python is None:
            with suppress(InlayError, OSError):
                own = Interpreter(sys.executable)
                _ahead.append(NewProcess.begin(_start(settings, own, telemetry.log_format)))
        yield
    finally:
        _take()


def new_process(
    settings: EngineSettings,
    python: Interpreter,
    *,
    host: str = "localhost",
    environment: Mapping[str, str] = MappingProxyType({}),
    log_format: str = "text",
) -> NewProcess:
    """Return a new process for an engine of these settings: started now, or ahead.

    Args:
        settings: of the engine.
        python: that it runs in.
        host: name of this machine by which other workers reach it.
        environment: variables it is to have beside what it inherits and its engine needs.
        log_format: of its lines until it is told more.
    """
    start = _start(settings, python, log_format, host, environment)
    return _take(start) or NewProcess.begin(start)


def _take(start: _Start | None = None) -> NewProcess | None:
    """Return the process that was started ahead; end it where it was started with anything else."""
    if not _ahead:
        return None
    found = _ahead.pop()
    if found.start == start:
        return found
    found.end()
    return None


def _start(
    settings: EngineSettings,
    python: Interpreter,
    log_format: str,
    host: str = "localhost",
    environment: Mapping[str, str] = MappingProxyType({}),
) -> _Start:
    library = spec_of(settings).library
    return _Start(
        (python.path, *((library,) if library in _AHEAD else ())),
        {
            **os.environ,
            **engine.environment(settings, os.environ, host),
            **python.environment(os.environ),
            **environment,
            FORMAT_VARIABLE: log_format,
        },
    )
