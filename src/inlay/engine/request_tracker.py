"""One request in vLLM or SGLang: its output, its end, and its resumption after a preemption.

On the event loop.
"""

from msgspec.structs import replace

from inlay.base.errors import EngineError, ErrorFrame, InlayError
from inlay.engine.shell import send
from inlay.engine.slots import EngineSlot
from inlay.messages.request import (
    Emit,
    EngineUsage,
    FinishReason,
    Output,
    Payload,
    PromptLogprobs,
    Request,
    TokenLogprobs,
)

NOT_FINITE = "the model's output was not finite: NaN or infinity came out of this prompt"


class RequestTracker:
    """A request, where its output goes, and how far it is.

    Attributes:
        request: as it was sent.
        request_id: its id in the engine, never used again; each attempt has another.
        admitted: the engine has it, and has not ended it.
        yielding: its place is being taken back: an "abort" of the engine is not its end.
        has_emitted: some of its output was emitted.
        ended: its last output was emitted.
        place: in the engine's batch, once it has asked for one.
        output: ids so far, those of earlier attempts included.
        cached: positions of the prompt that were cached.
    """

    def __init__(self, request: Request, emit: Emit, request_id: str) -> None:
        self.request = request
        self.request_id = request_id
        self.admitted = False
        self.yielding = False
        self.has_emitted = False
        self.ended = False
        self.place: EngineSlot | None = None
        self.output = list(request.prior_output)
        self.cached = 0
        self._emit = emit

    @property
    def num_tokens(self) -> int:
        """Output tokens so far."""
        return len(self.output)

    @property
    def _queued_seconds(self) -> float:
        return 0.0 if self.place is None else self.place.waited_seconds

    @property
    def room(self) -> int:
        """Output tokens that may still come."""
        return self.request.sampling.max_tokens - self.num_tokens

    def leaves(self) -> bool:
        """Return True if it has ended or gives its place back: the engine is not to run it."""
        return self.ended or self.yielding

    def continuation(self) -> Request:
        """The request as it goes to the engine now, with its output so far as `prior_output`."""
        if not self.has_emitted:
            return self.request
        sampling = replace(self.request.sampling, prompt_logprobs=None)
        return replace(self.request, prior_output=tuple(self.output), params=sampling)

    def corrupted(self) -> None:
        """End it with an error: there was NaN in its output."""
        self.end("error", EngineError(NOT_FINITE))

    def end(self, reason: FinishReason, error: InlayError | None = None) -> None:
        """Emit the last output, once."""
        if not self.ended:
            self.put((), (), None, reason, error)

    def put(
        self,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: PromptLogprobs | None,
        reason: FinishReason | None,
        error: InlayError | None = None,
        payloads: tuple[Payload, ...] = (),
    ) -> None:
        """Emit an output with new tokens, the end, or both."""
        offset = self.num_tokens
        self.output += ids
        if reason == "error" and error is None:
            error = EngineError("the engine failed to run the request")
        usage = None
        if reason is not None or not self.has_emitted:
            usage = EngineUsage(
                len(self.request.prompt), self.num_tokens, self.cached, self._queued_seconds
            )
        self.has_emitted = True
        if reason is not None:
            self.ended = True
        output = Output(
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
            payloads,
        )
        if not send(self.request, self._emit, output):
            self.ended = True
