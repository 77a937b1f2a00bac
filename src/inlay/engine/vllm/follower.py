"""One work under way in vLLM: what vLLM says of it becomes deltas. On the event loop; no vLLM."""

import asyncio
import math
from array import array
from typing import Any

from inlay.errors import EngineError, ErrorFrame, InlayError
from inlay.protocol.work import (
    Delta,
    Emit,
    FinishReason,
    PromptLogprobs,
    TokenLogprobs,
    Usage,
    Work,
)

_NOT_FINITE = "the model's output was not finite: NaN or infinity came out of this prompt"


class Follower:
    """A work, who hears of it, and how far it is.

    Attributes:
        work: as it was sent.
        request_id: what vLLM calls it, never used again.
        admitted: vLLM knows of it.
        told: something of its output was emitted.
        ended: its last delta was emitted.
        timer: of its deadline.
    """

    def __init__(self, work: Work, emit: Emit, request_id: str) -> None:
        self.work = work
        self.request_id = request_id
        self.admitted = False
        self.ended = False
        self.timer: asyncio.TimerHandle | None = None
        self._emit = emit
        self._made = len(work.prior_output)
        self.told = False
        self._cached = 0

    def take(self, output: Any) -> None:
        """Emit what a `RequestOutput` adds. Nothing once it has ended."""
        if self.ended:
            return
        said = output.outputs[0]
        if output.num_cached_tokens:
            self._cached = min(output.num_cached_tokens, len(self.work.prompt))
        prompt_logprobs = self._of_prompt(output.prompt_logprobs)
        # Where no output was asked for, vLLM makes a token all the same.
        room = self.work.sampling.max_tokens - self._made
        ids = tuple(said.token_ids)[:room]
        logprobs = self._of_output(said.logprobs, len(ids))
        if any(math.isnan(entry.logprob) for entry in logprobs):
            self.end("error", EngineError(_NOT_FINITE))
            return
        if not ids and prompt_logprobs is None and said.finish_reason is None:
            return
        reason = _reason(said.finish_reason)
        self._put(ids, logprobs, prompt_logprobs, "length" if reason == "stop" and not room else reason, None)

    def corrupted(self) -> None:
        """End it: its logits held NaN."""
        self.end("error", EngineError(_NOT_FINITE))

    def end(self, reason: FinishReason, error: InlayError | None = None) -> None:
        """Emit the last delta. Nothing when it was emitted before."""
        if not self.ended:
            self._put((), (), None, reason, error)

    def _put(
        self,
        ids: tuple[int, ...],
        logprobs: tuple[TokenLogprobs, ...],
        prompt_logprobs: PromptLogprobs | None,
        reason: FinishReason | None,
        error: InlayError | None,
    ) -> None:
        offset, self._made = self._made, self._made + len(ids)
        if reason == "error" and error is None:
            error = EngineError("vLLM failed to run the request")
        usage = None
        if reason is not None or not self.told:
            usage = Usage(len(self.work.prompt), self._made, self._cached)
        self.told = True
        if reason is not None:
            self.ended = True
            if self.timer is not None:
                self.timer.cancel()
        self._emit(
            Delta(
                self.work.id,
                self.work.attempt,
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

    def _of_output(self, flat: Any, count: int) -> tuple[TokenLogprobs, ...]:
        """The entries of vLLM's `FlatLogprobs`: at each position the chosen token, then the most likely."""
        top = self.work.sampling.logprobs
        if top is None or flat is None:
            return ()
        entries = []
        for start in flat.start_indices[:count]:
            best = range(start + 1, start + 1 + top)
            entries.append(
                TokenLogprobs(
                    flat.logprobs[start], tuple((flat.token_ids[at], flat.logprobs[at]) for at in best)
                )
            )
        return tuple(entries)

    def _of_prompt(self, flat: Any) -> PromptLogprobs | None:
        """Those of the prompt, which come at once; position 0 has none."""
        top = self.work.sampling.prompt_logprobs
        if top is None or flat is None or len(flat) < 2:
            return None
        ids, logprobs, ranks = array("i"), array("f"), array("i")
        for start in flat.start_indices[1:]:
            stop = start + 1 + top
            ids.extend(flat.token_ids[start:stop])
            logprobs.extend(flat.logprobs[start:stop])
            ranks.append(flat.ranks[start])
        return PromptLogprobs(1, ids.tobytes(), logprobs.tobytes(), ranks.tobytes())


def _reason(said: str | None) -> FinishReason | None:
    match said:
        case None | "stop" | "length" | "abort":
            return said
        case "repetition":
            return "stop"
        case _:
            return "error"


__all__ = ["Follower"]
