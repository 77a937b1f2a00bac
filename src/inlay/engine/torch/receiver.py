"""Who hears of a work."""

from typing import NamedTuple

from inlay.errors import ErrorFrame, InlayError
from inlay.protocol.work import Delta, Emit, FinishReason, Usage, Work


class Receiver(NamedTuple):
    """Who hears of a work, and how a delta about it starts when the engine's thread never saw it."""

    work: Work
    emit: Emit

    def lost(self, error: InlayError) -> Delta:
        """The last delta, with `error`."""
        return self._last("error", ErrorFrame.of(error))

    def aborted(self) -> Delta:
        """The last delta of a work that was stopped."""
        return self._last("abort", None)

    def _last(self, reason: FinishReason, error: ErrorFrame | None) -> Delta:
        done = len(self.work.prior_output)
        return Delta(
            self.work.id,
            self.work.attempt,
            done,
            finish_reason=reason,
            usage=Usage(len(self.work.prompt), done),
            error=error,
        )


__all__ = ["Receiver"]
