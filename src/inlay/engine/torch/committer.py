"""`Committer`: keys and values of a step that was read become those of its sequences."""

from collections.abc import Iterable

from inlay.engine.torch.in_flight_step import TokenRun
from inlay.engine.torch.scheduler import Scheduler


class Committer:
    """Names the pages that good chunks filled, and has those of bad ones scrubbed."""

    def __init__(self, scheduler: Scheduler) -> None:
        self._scheduler = scheduler

    def commit(self, runs: Iterable[TokenRun]) -> None:
        """Commit the chunks whose results are finite; the others' sequences are to be ended."""
        bad = []
        for run in runs:
            chunk = run.chunk
            if not run.finite:
                bad.append(chunk)
                continue
            if chunk.drafts:
                chunk = self._scheduler.accept_drafts(chunk, run.accepted)
            # First, as committing frees the pages that a window has passed.
            self._scheduler.mark_verified(chunk)
            self._scheduler.commit(chunk, unscheduled=run.unscheduled)
        for chunk in bad:
            self._scheduler.invalidate(chunk)
