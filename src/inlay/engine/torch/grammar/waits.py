"""Requests that wait for their grammars; the core does not know them until then."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from inlay.engine.torch.grammar.grammars import MAX_SECONDS, Grammars, Waiting, too_late
from inlay.engine.torch.grammar.state import GrammarState
from inlay.errors import EngineError, InlayError
from inlay.request import Grammar, Request

log = logging.getLogger(__name__)


class GrammarWaits:
    """The waits of one event loop.

    Args:
        grammars: compiles them.
        ended: called once for each wait that is not stopped, with the request's id and the
            grammar's state after the earlier output, or the error that the request ends with.
    """

    def __init__(
        self, grammars: Grammars, ended: Callable[[str, GrammarState | InlayError], None]
    ) -> None:
        self._grammars = grammars
        self._ended = ended
        self._waits: dict[str, tuple[asyncio.TimerHandle, Waiting]] = {}

    def start(self, request: Request, grammar: Grammar) -> None:
        """Compile the grammar of `request`.

        Raises:
            OverloadedError: the engine is closing.
        """
        loop = asyncio.get_running_loop()

        def compiled(future: "Future[GrammarState]") -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(arrived, future)

        def arrived(future: "Future[GrammarState]") -> None:
            known = self._waits.get(request.id)
            if known is None or known[1] is not waiting:
                return
            self.stop(request.id)
            cause = future.exception()
            if cause is None:
                self._ended(request.id, future.result())
            elif isinstance(cause, InlayError):
                self._ended(request.id, cause)
            else:
                log.error("the grammar of request %s was not compiled", request.id, exc_info=cause)
                failed = EngineError(f"the grammar was not compiled: {type(cause).__name__}")
                self._ended(request.id, failed)

        def late() -> None:
            self.stop(request.id)
            self._ended(request.id, too_late(waiting, request.deadline))

        waiting = self._grammars.start(
            grammar,
            request.sampling.stop_token_ids,
            request.prior_output,
            client=request.client,
            salt=request.salt,
        )
        seconds = MAX_SECONDS if request.deadline is None else min(MAX_SECONDS, request.deadline)
        self._waits[request.id] = loop.call_later(seconds, late), waiting
        waiting.state.add_done_callback(compiled)

    def stop(self, request_id: str) -> bool:
        """Cancel a wait. Returns True if the request was waiting."""
        timer, waiting = self._waits.pop(request_id, (None, None))
        if timer is None or waiting is None:
            return False
        timer.cancel()
        waiting.state.cancel()
        return True

    def stop_all(self) -> list[str]:
        """Cancel every wait; return the ids of the requests."""
        return [request_id for request_id in tuple(self._waits) if self.stop(request_id)]

    def close(self) -> None:
        """Stop compiling."""
        self._grammars.close()
