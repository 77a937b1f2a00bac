"""The worker process; started by `inlay.worker.spawn`, not by hand."""

import asyncio
import sys

from inlay.telemetry import configure
from inlay.worker.process import run


def main() -> int:
    """Run a worker on the file descriptors named in the arguments."""
    configure("text")
    socket_fd, arena_fd, arena_bytes = (int(argument) for argument in sys.argv[1:4])
    return asyncio.run(run(socket_fd, arena_fd, arena_bytes))


if __name__ == "__main__":
    sys.exit(main())
