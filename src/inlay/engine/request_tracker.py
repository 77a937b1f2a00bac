"""One request under way in another's engine: what is emitted of it, and when it has ended.

On the event loop.
"""

import asyncio

from inlay.errors import EngineError, ErrorFrame, InlayError
from inlay.request import Emit, FinishReason, Output, PromptLogprobs, Request, TokenLogprobs, Usage

NOT_FINITE = "the model's output was not finite: NaN or infinity came out of this prompt"


class RequestTracker:
    """A request, who hears of it, and how far it is.

    Attributes:
        request: as it was sent.
        request_id: what the engine calls it, never used again.
        admitted: the engine knows of it.
        told: something of its output was emitted.
        ended: its last output was emitted.
        timer: of its deadline.
        made: output tokens, those of earlier attempts included.
        cached: positions of the prompt that were cached.
    """

    def __init__(self, request: Request, emit: Emit, request_id: str) -> None:
        self.request = request
        self.request_id = request_id
        self.admitted = False
        self.told = False
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None
        self.made = len(request.prior_output)
        self.cached = 0
        self._emit = emit

    @property
    def room(self) -> int:
        """Output tokens that may still come."""
        return self.request.sampling.max_tokens - self.made

    def corrupted(self) -> None:
        """End it: what came out of it held NaN."""
        self.end("error", EngineError(NOT_FINITE))

    def end(self, reason: FinishReason, error: InlayError | None = None) -> None:
        """Emit the last output. Nothing when it was emitted before."""
        if not self.ended:
            self.put((), (), None, reason, error)

    def put(
        self,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: PromptLogprobs | None,
        reason: FinishReason | None,
        error: InlayError | None = None,
    ) -> None:
        """Emit an output of what is new."""
        offset, self.made = self.made, self.made + len(ids)
        if reason == "error" and error is None:
            error = EngineError("the engine failed to run the request")
        usage = None
        if reason is not None or not self.told:
            usage = Usage(len(self.request.prompt), self.made, self.cached)
        self.told = True
        if reason is not None:
            self.ended = True
            if self.timer is not None:
                self.timer.cancel()
        self._emit(
            Output(
                self.request.id,
                self.request.attempt,
                offset,
                ids,
                logprobs,
                reason,
                ids[-1] if reason == "stop" and ids else None,
                usage,
                None if error is None else ErrorFrame.of(error),
                prompt_logprobs,
            )
        )


__all__ = ["NOT_FINITE", "RequestTracker"]
