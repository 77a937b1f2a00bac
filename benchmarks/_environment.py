"""The environment variables that engines run with, for benchmarks that run one themselves."""

import os
import sys

from inlay.engine.torch.threads import environment


def ensure(module: str) -> None:
    """Start `module` anew with the engine's environment, unless it has it.

    libgomp and glibc read theirs when they are loaded, which has happened.
    """
    missing = {
        name: value
        for name, value in environment(os.environ).items()
        if os.environ.get(name) != value
    }
    if missing:
        words = [sys.executable, "-m", module, *sys.argv[1:]]
        os.execve(sys.executable, words, {**os.environ, **missing})
