"""The worker process; started by `inlay.worker.spawn`, not by hand."""

import asyncio
import atexit
import os
import sys

from inlay.base.pace import importing

with importing():
    from inlay.telemetry import configure
    from inlay.telemetry.logs import FORMAT_VARIABLE
    from inlay.worker.process import run


def main() -> int:
    """Run a worker on the file descriptors named in the arguments."""
    configure("json" if os.environ.get(FORMAT_VARIABLE) == "json" else "text")
    return asyncio.run(run(*map(int, sys.argv[1:])))


if __name__ == "__main__":
    status = main()
    # Taking an engine's modules apart one by one takes longer than a second.
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(status)
