"""One engine in its own process: admits, runs, aborts, drains."""

from inlay.worker.process import WorkerProcess, spawn

__all__ = ["WorkerProcess", "spawn"]
