"""A server of the chat's own, for a model that nobody serves yet."""

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from multiprocessing.connection import Connection
from typing import cast

from inlay.base.errors import EngineError
from inlay.cli.process import Console
from inlay.cli.settings import ServeSettings

_END_SECONDS = 20.0


def serve_settings(model: str, words: Sequence[str]) -> ServeSettings:
    """Settings of the server: a free port, embeddings accepted, quiet, and what `words` say.

    Raises:
        UsageError: it has no such option.
    """
    from inlay.cli.commands import commands, known_variables
    from inlay.cli.reading import parse, read

    serve = next(command for command in commands() if command.name == "serve")
    ours = ["--port", "0", "--enable-prompt-embeds", "--no-log-requests", *words]
    return cast(
        "ServeSettings",
        read(serve, parse(serve, [model, *ours]), os.environ, known_variables()),
    )


@contextmanager
def own_server(settings: ServeSettings) -> Iterator[str]:
    """Serve in a process of its own; yields its base URL once it answers.

    It ends with the block, and also when this process is gone. Ctrl-C in the terminal does not
    reach it, as it ends an answer and not the server.

    Raises:
        EngineError: it ended before it was ready; it has said why on standard error.
    """
    context = multiprocessing.get_context("spawn")
    ours, its = context.Pipe()
    process = context.Process(target=_serve, args=(settings, its), name="inlay-serve")
    process.start()
    its.close()
    try:
        try:
            url: str = ours.recv()
        except EOFError as error:
            raise EngineError("the server did not start") from error
        yield f"{url}/v1"
    except BaseException:
        # Also while it loads, when it cannot hear that the other end is closed.
        process.terminate()
        raise
    finally:
        ours.close()
        process.join(_END_SECONDS)
        if process.is_alive():
            process.kill()
            process.join()


def _serve(settings: ServeSettings, pipe: Connection) -> None:
    import asyncio

    from inlay.cli.main import failing
    from inlay.cli.serve import RunningServer, run_host

    os.setpgid(0, 0)
    loop: asyncio.AbstractEventLoop | None = None
    gone = threading.Event()
    running: RunningServer | None = None

    def watch() -> None:
        # Nothing is ever sent this way: it ends when the chat closes its end, or dies.
        try:
            pipe.recv()
        except EOFError:
            gone.set()
        if loop is not None and running is not None:
            loop.call_soon_threadsafe(running.stop.set)
        else:
            os.kill(os.getpid(), signal.SIGTERM)

    async def ready(server: RunningServer) -> None:
        nonlocal loop, running
        loop, running = asyncio.get_running_loop(), server
        if gone.is_set():
            server.stop.set()
            return
        pipe.send(server.url)

    threading.Thread(target=watch, name="chat-is-there", daemon=True).start()
    console = Console(sys.stdout, sys.stderr)
    sys.exit(failing("inlay chat", console, lambda: run_host(settings, console, ready)))
