"""The worker process; started by `inlay.worker.new_process`, not by hand."""

import asyncio
import atexit
import os
import socket
import sys
from threading import Thread

from inlay.base.pace import importing


def main() -> int:
    """Run a worker on the connection named in the arguments; the library to import may follow."""
    connection = socket.socket(fileno=int(sys.argv[1]))
    lent: list[int] = []
    waiting = Thread(target=_wait, args=(connection, lent), daemon=True)
    waiting.start()
    with importing():
        from inlay.telemetry import configure
        from inlay.telemetry.logs import FORMAT_VARIABLE
        from inlay.worker.child import import_ahead, run

        configure("json" if os.environ.get(FORMAT_VARIABLE) == "json" else "text")
        failed = import_ahead(sys.argv[2:])
    waiting.join()
    return asyncio.run(run(connection, *lent, failed=failed))


def _wait(connection: socket.socket, lent: list[int]) -> None:
    """Wait for what the process is lent; end it at once when nobody is left to lend it."""
    said, descriptors, _, _ = socket.recv_fds(connection, 1, 2)
    if not said:
        os._exit(1)
    lent += descriptors


if __name__ == "__main__":
    status = main()
    # Taking an engine's modules apart one by one takes longer than a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
