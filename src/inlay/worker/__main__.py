"""The worker process; started by `inlay.worker.spawn`, not by hand."""

import asyncio
import logging
import sys

from inlay.worker.process import run


def main() -> int:
    """Run a worker on the file descriptors named in the arguments."""
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(levelname)s %(name)s: %(message)s")
    socket_fd, arena_fd, arena_bytes = (int(argument) for argument in sys.argv[1:4])
    return asyncio.run(run(socket_fd, arena_fd, arena_bytes))


if __name__ == "__main__":
    sys.exit(main())
