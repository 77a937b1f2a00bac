"""One engine in its own process: admits, runs, aborts, drains.

And what keeps that process running.
"""

from inlay.worker.engine_proxy import EngineProxy
from inlay.worker.process import WorkerProcess, spawn, starting
from inlay.worker.supervisor import Backoff, RestartGroup, Supervisor

__all__ = [
    "Backoff",
    "EngineProxy",
    "RestartGroup",
    "Supervisor",
    "WorkerProcess",
    "spawn",
    "starting",
]
