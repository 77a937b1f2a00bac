"""One engine in its own process: it admits, runs, aborts and drains; a supervisor restarts it.

Engines are in `inlay.engine`, what a frontend and a worker say in `inlay.transport`.
"""

from typing import TYPE_CHECKING

from inlay.base.lazy import exported

if TYPE_CHECKING:
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

__getattr__ = exported(
    __name__,
    {
        "Backoff": "supervisor",
        "EngineProxy": "engine_proxy",
        "RestartGroup": "supervisor",
        "Supervisor": "supervisor",
        "WorkerProcess": "process",
        "spawn": "process",
        "starting": "process",
    },
)
