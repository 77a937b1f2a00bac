"""Receiver of a request's outputs."""

from typing import NamedTuple

from inlay.errors import ErrorFrame, InlayError
from inlay.request import Emit, FinishReason, Output, Request, Usage


class RequestReceiver(NamedTuple):
    """Receiver of a request's outputs, and its last output if the thread never saw it."""

    request: Request
    emit: Emit

    def lost(self, error: InlayError) -> Output:
        """Return the last output, with `error`."""
        return self._last("error", ErrorFrame.of(error))

    def aborted(self) -> Output:
        """Return the last output of an aborted request."""
        return self._last("abort", None)

    def _last(self, reason: FinishReason, error: ErrorFrame | None) -> Output:
        done = len(self.request.prior_output)
        return Output(
            self.request.id,
            self.request.attempt,
            done,
            finish_reason=reason,
            usage=Usage(len(self.request.prompt), done),
            error=error,
        )


__all__ = ["RequestReceiver"]
