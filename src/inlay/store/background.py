"""A thread for slow operations that callers need not wait for."""

import logging
import threading
from collections.abc import Callable
from queue import SimpleQueue

_log = logging.getLogger(__name__)


class BackgroundThread:
    """Jobs, run one after the other in a thread of their own."""

    __slots__ = ("_jobs", "_thread")

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], object] | None] = SimpleQueue()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def submit(self, job: Callable[[], object]) -> None:
        """Run `job` after those before it. Never waits."""
        self._jobs.put(job)

    def flush(self) -> None:
        """Return when every job submitted so far has run."""
        done = threading.Event()
        self.submit(done.set)
        done.wait()

    def close(self) -> None:
        """Run what was submitted, then end the thread."""
        self._jobs.put(None)
        self._thread.join()

    def _run(self) -> None:
        while (job := self._jobs.get()) is not None:
            try:
                job()
            except Exception:
                # The jobs handle the errors they expect; any other must not end the thread all
                # others rely on.
                _log.exception("a job of %s failed", self._thread.name)
