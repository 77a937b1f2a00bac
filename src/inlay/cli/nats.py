"""`inlay nats`: the real NATS server, set up for a fleet."""

import asyncio
import json
import os
import shutil
import signal
import socket
import sys
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from functools import partial
from ipaddress import ip_address
from pathlib import Path

from inlay.base import extras
from inlay.base.errors import EngineError, InvalidRequestError, why_unusable
from inlay.base.parent import end_with_parent
from inlay.cli.process import Console
from inlay.cli.settings import NatsServerSettings
from inlay.http.address import check_address
from inlay.transport.nats.settings import public_key_in

_LOOK_SECONDS = 0.05
_STOP_SECONDS = 10.0
_LOG_BYTES = 16 * 1024 * 1024
_SHOWN_LINES = 5
_PING = "15s"
"""Period of the server's pings to its clients.

A frozen client is disconnected after three of them.
"""


def run(settings: NatsServerSettings, extra_args: Sequence[str]) -> int:
    """Run the server until a signal; return the exit status.

    Raises:
        InlayError: it is not installed, the address is taken, or it ended by itself.
    """
    asyncio.run(_host(settings, extra_args, Console(sys.stdout, sys.stderr)))
    return 0


def binary() -> str:
    """The server's program: beside this Python, or on the path.

    Raises `InvalidRequestError` where there is none.
    """
    beside = str(Path(sys.executable).parent)
    found = shutil.which("nats-server", path=os.pathsep.join((beside, os.environ.get("PATH", ""))))
    if found is None:
        raise InvalidRequestError(f"nats-server is not installed: {extras.install('nats')}")
    return found


def configuration(settings: NatsServerSettings, directory: Path, key: str | None = None) -> str:
    """The server's configuration file; with a `key`, only members that have it may connect."""
    # A JSON string is a quoted string of NATS' configuration too.
    return "\n".join(
        (
            f"log_file: {json.dumps(str(_log_file(directory)))}",
            f"logfile_size_limit: {_LOG_BYTES}",
            "logfile_max_num: 2",
            *([] if key is None else [f"authorization {{ users: [ {{ nkey: {key} }} ] }}"]),
            f"host: {json.dumps(settings.host)}",
            f"port: {settings.port}",
            f"max_payload: {settings.max_payload}",
            f"ping_interval: {json.dumps(_PING)}",
            f"jetstream {{ store_dir: {json.dumps(str(directory))} }}",
            "",
        )
    )


def _log_file(directory: Path) -> Path:
    return directory / "nats.log"


def _store_dir(settings: NatsServerSettings) -> Path:
    if settings.store_dir is not None:
        return settings.store_dir
    state = os.environ.get("XDG_STATE_HOME")
    try:
        base = Path(state) if state else Path.home() / ".local" / "state"
    except RuntimeError as error:
        raise InvalidRequestError("there is no home directory: --store-dir is needed") from error
    return base / "inlay" / f"nats-{settings.port}"


async def _host(settings: NatsServerSettings, extra_args: Sequence[str], console: Console) -> None:
    program = binary()
    check_address(settings.host, settings.port)
    directory = _store_dir(settings)
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as error:
        raise InvalidRequestError(f"{directory} cannot be made: {why_unusable(error)}") from error
    stop = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, stop.set)
    with ExitStack() as stack:
        log = _log_file(directory)
        logged = log.stat().st_size if log.exists() else 0
        seed = settings.nats_nkey_seed or directory / "members.nk"
        key = public_key(seed) if wants_key(settings, extra_args) else None
        # In the store directory: where this process is killed, the next one writes it again.
        config = directory / "nats.conf"
        stack.callback(config.unlink, missing_ok=True)
        config.write_text(configuration(settings, directory, key), encoding="utf-8")
        process = await asyncio.create_subprocess_exec(
            *(program, "-c", str(config), *extra_args),
            stdin=asyncio.subprocess.DEVNULL,
            # Ctrl-C in a terminal is for this process, which ends the server.
            start_new_session=True,
            preexec_fn=partial(end_with_parent, signal.SIGTERM),
        )
        waiting = [asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())]
        lines = (
            f"NATS at {_url(settings)}; its data and its log are in {directory}",
            _who(None if key is None else seed, extra_args),
            "Ctrl-C ends it",
        )
        answering = asyncio.create_task(_answering(settings, lines, console))
        try:
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        finally:
            answering.cancel()
            ended = process.returncode
            await _end(process)
            for task in waiting:
                task.cancel()
    if ended is not None:
        raise EngineError(f"the NATS server ended with status {ended}: {_last_words(log, logged)}")


def _here(settings: NatsServerSettings) -> str:
    return "127.0.0.1" if settings.host in ("0.0.0.0", "::", "") else settings.host


def _url(settings: NatsServerSettings) -> str:
    """The address that members are given."""
    here = _here(settings)
    shown = here if here == settings.host else socket.gethostname()
    return (
        f"nats://[{shown}]:{settings.port}" if ":" in shown else f"nats://{shown}:{settings.port}"
    )


def _who(seed: Path | None, extra_args: Sequence[str]) -> str:
    """A line about access to the server."""
    if seed is not None:
        return (
            f"members need the key: give worker, frontend and status --nats-nkey-seed {seed}, "
            "on other machines a copy of it"
        )
    if says_who(extra_args):
        return "access is set by the words after --"
    return (
        "everyone who reaches it may connect and read the secret of the fleet; --credentials asks "
        "for a key"
    )


async def _answering(settings: NatsServerSettings, lines: Sequence[str], console: Console) -> None:
    """Print `lines` once it answers."""
    while True:
        try:
            reader, writer = await asyncio.open_connection(_here(settings), settings.port)
            await reader.readline()
        except OSError:
            await asyncio.sleep(_LOOK_SECONDS)
        else:
            writer.close()
            break
    for line in lines:
        console.line(line)


def _last_words(file: Path, start: int) -> str:
    """The end of what the server's log got from byte `start` on."""
    try:
        lines = file.read_bytes()[start:].decode(errors="replace").splitlines()
    except FileNotFoundError:
        lines = []
    if not lines:
        return "its own output above says why"
    return "\n".join((f"its log, {file}, ends in", *lines[-_SHOWN_LINES:]))


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


_OWN_WORDS = frozenset({"user", "pass", "auth", "tlsverify", "c", "config"})
"""nats-server's flags that say who is let in, or that bring a configuration of its own."""


def is_local(host: str) -> bool:
    """Return True if only this machine reaches a server that listens there."""
    try:
        return ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def says_who(extra_args: Sequence[str]) -> bool:
    """Return True if arguments for nats-server configure access themselves."""
    return any(
        word.lstrip("-").partition("=")[0] in _OWN_WORDS
        for word in extra_args
        if word.startswith("-")
    )


def wants_key(settings: NatsServerSettings, extra_args: Sequence[str]) -> bool:
    """Return True if members must log in with the key of a seed file."""
    if settings.credentials is not None:
        return settings.credentials
    return settings.nats_nkey_seed is not None or not (
        is_local(settings.host) or says_who(extra_args)
    )


def public_key(file: Path) -> str:
    """The public key of the nkey seed in `file`.

    Where there is no such file, a seed is made and written there, for its owner alone.

    Raises:
        InvalidRequestError: the file cannot be read or made, or has no user's seed.
    """
    import nkeys

    try:
        with os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as new:
            new.write(nkeys.encode_seed(os.urandom(32), nkeys.PREFIX_BYTE_USER))
    except FileExistsError:
        pass
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be made: {error.strerror}") from error
    key = public_key_in(file)
    if not key.startswith("U"):
        raise InvalidRequestError(f"{file} has the seed of no user: its public key is {key}")
    return key
