"""`GrammarProvider`: states of the grammars that requests wait for."""

import asyncio
import logging
from collections.abc import Callable
from concurrent.futures import Future
from contextlib import suppress

from inlay.base.errors import EngineError, InlayError
from inlay.engine.torch.grammar.grammars import MAX_SECONDS, Grammars, too_late
from inlay.engine.torch.grammar.state import GrammarState
from inlay.engine.torch.needs import Need, Result
from inlay.messages.request import Request

log = logging.getLogger(__name__)


class GrammarProvider:
    """`Provider` of grammars' states after the earlier output, within `MAX_SECONDS`."""

    def __init__(self, grammars: Grammars) -> None:
        self._grammars = grammars

    def start(
        self, request: Request, need: Need, done: Callable[[Result], object]
    ) -> Callable[[], object]:
        """As `Provider`.

        Raises:
            OverloadedError: the engine is closing.
        """
        assert request.sampling.grammar is not None
        loop = asyncio.get_running_loop()
        waiting = self._grammars.start(
            request.sampling.grammar,
            request.sampling.stop_token_ids,
            request.prior_output,
            client=request.client,
            salt=request.salt,
        )

        def compiled(state: "Future[GrammarState]") -> None:
            with suppress(RuntimeError):  # the event loop is closed
                loop.call_soon_threadsafe(arrived, state)

        def arrived(state: "Future[GrammarState]") -> None:
            timer.cancel()
            if not state.cancelled():
                done(_result(request, state))

        def late() -> None:
            error = too_late(waiting)
            waiting.state.cancel()
            done(error)

        def stop() -> None:
            timer.cancel()
            waiting.state.cancel()

        timer = loop.call_later(MAX_SECONDS, late)
        waiting.state.add_done_callback(compiled)
        return stop

    def close(self) -> None:
        """Compile nothing more."""
        self._grammars.close()


def _result(request: Request, state: "Future[GrammarState]") -> Result:
    error = state.exception()
    if error is None or isinstance(error, InlayError):
        return error or state.result()
    log.error("the grammar of request %s was not compiled", request.id, exc_info=error)
    return EngineError(f"the grammar was not compiled: {type(error).__name__}")
