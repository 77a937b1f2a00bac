"""One engine in its own process: admits, runs, aborts, drains.

And what keeps that process running.
"""

from inlay.worker.process import WorkerProcess, spawn, starting
from inlay.worker.relay import Relay
from inlay.worker.supervisor import Backoff, RestartGroup, Supervisor

__all__ = ["Backoff", "Relay", "RestartGroup", "Supervisor", "WorkerProcess", "spawn", "starting"]
