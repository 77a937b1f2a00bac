"""One request in vLLM: vLLM's outputs become inlay's.

On the event loop; no vLLM.
"""

import math
from array import array
from typing import Any

from inlay.engine.request_tracker import RequestTracker
from inlay.engine.vllm.tickets import Ticket
from inlay.messages.request import (
    Emit,
    FinishReason,
    Payload,
    PromptLogprobs,
    Request,
    TokenLogprobs,
)


class VllmRequestTracker(RequestTracker):
    """A request that vLLM runs.

    Attributes:
        ticket: for its prompt's keys and values, until vLLM has been told of them.
        payloads: that come with its last output.
    """

    def __init__(
        self, request: Request, emit: Emit, request_id: str, ticket: Ticket | None
    ) -> None:
        super().__init__(request, emit, request_id)
        self.ticket = ticket
        self.payloads: tuple[Payload, ...] = ()

    def take(self, output: Any) -> bool:
        """Emit what a `RequestOutput` adds, nothing once it has ended.

        False when there is NaN in it, of which nothing is emitted.
        """
        if self.ended:
            return True
        said = output.outputs[0]
        if output.num_cached_tokens and not self.has_emitted:
            self.cached = min(output.num_cached_tokens, len(self.request.prompt))
        prompt_logprobs = self._of_prompt(output.prompt_logprobs)
        # Where no output was asked for, vLLM makes a token all the same.
        room = self.room
        ids = tuple(said.token_ids)[:room]
        logprobs = self._of_output(said.logprobs, len(ids))
        if any(math.isnan(entry.logprob) for entry in logprobs):
            return False
        preempted = self.yielding and said.finish_reason == "abort"
        reason = None if preempted else _reason(said.finish_reason)
        if not ids and prompt_logprobs is None and reason is None:
            return True
        if reason == "stop" and not room:
            reason = "length"
        self.put(ids, logprobs, prompt_logprobs, reason, payloads=self.payloads)
        return True

    def _of_output(self, flat: Any, count: int) -> tuple[TokenLogprobs, ...]:
        """The entries of vLLM's `FlatLogprobs`: at each position the chosen token, then others."""
        sampling = self.request.sampling
        if sampling.logprobs is None or flat is None:
            return ()
        top = len(sampling.logprob_token_ids) or sampling.logprobs
        entries = []
        for start, end in list(zip(flat.start_indices, flat.end_indices, strict=True))[:count]:
            best = list(range(start + 1, end))
            if len(best) < top:
                # Outputs that vLLM joins while nobody reads them name no token twice: the chosen
                # one, if it is among the others too, is first alone. Its rank says where it was.
                best.insert(flat.ranks[start] - 1, start)
            entries.append(
                TokenLogprobs(
                    flat.logprobs[start],
                    tuple((flat.token_ids[at], flat.logprobs[at]) for at in best),
                )
            )
        return tuple(entries)

    def _of_prompt(self, flat: Any) -> PromptLogprobs | None:
        """Those of the prompt, which come at once; position 0 has none."""
        top = self.request.sampling.prompt_logprobs
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
