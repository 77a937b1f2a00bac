"""Requests of an engine, and who receives their outputs."""

import logging
from collections.abc import Iterable
from typing import NamedTuple

from msgspec.structs import replace

from inlay.engine.torch.grammar.state import GrammarState
from inlay.engine.torch.step import Core
from inlay.errors import EngineError, InlayError
from inlay.request import Emit, FinishReason, Output, Request, Usage

log = logging.getLogger(__name__)


class Receiver(NamedTuple):
    """Receiver of a request's outputs, and its last output if the thread never saw it.

    `expires` is the request's deadline on the clock of `Core.expire`.
    """

    request: Request
    emit: Emit
    expires: float | None

    def lost(self, error: InlayError) -> Output:
        """Return the last output, with `error`."""
        return self._last("error", error)

    def aborted(self) -> Output:
        """Return the last output of an aborted request."""
        return self._last("abort", None)

    def _last(self, reason: FinishReason, error: InlayError | None) -> Output:
        usage = Usage(len(self.request.prompt), len(self.request.prior_output))
        return replace(self.request.end(reason, error), usage=usage)


def admit(
    receiver: Receiver, expires: float | None, grammar: GrammarState | None, core: Core
) -> Iterable[Output]:
    """Admit one request; an error ends only this one."""
    try:
        return core.admit(receiver.request, expires, grammar)
    except InlayError as error:
        return [receiver.lost(error)]
    except Exception as error:
        log.exception("request %s was not admitted", receiver.request.id)
        return [receiver.lost(EngineError(f"the request was not admitted: {type(error).__name__}"))]


__all__ = ["Receiver", "admit"]
