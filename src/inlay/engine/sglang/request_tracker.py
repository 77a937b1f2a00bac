"""One request in SGLang: SGLang's answers become inlay's outputs.

On the event loop; no SGLang.
"""

import asyncio
import math
from typing import Any

from inlay.base.errors import EngineError
from inlay.engine.request_tracker import RequestTracker
from inlay.engine.sglang.rooms import lost
from inlay.messages.request import Emit, Request, TokenLogprobs


class SglangRequestTracker(RequestTracker):
    """A request that SGLang runs.

    It ends at the first stop token, of which SGLang does not know: see `params_of`.

    Attributes:
        stop: done once the attempt under way is to stop, for a preemption.
    """

    def __init__(
        self, request: Request, emit: Emit, request_id: str, eos_token_ids: tuple[int, ...]
    ) -> None:
        super().__init__(request, emit, request_id)
        sampling = request.sampling
        self._stops = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_token_ids)}
        self._seen = 0
        self.stop: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def begin(self, request_id: str) -> None:
        """Begin another attempt, whose answers hold its own tokens alone."""
        self.request_id = request_id
        self.stop = asyncio.get_running_loop().create_future()
        self._seen = 0

    def take(self, answer: dict[str, Any]) -> bool:
        """Emit what an answer adds; answers hold all that came before.

        Nothing once it has ended. Returns True if it has.
        """
        if not self.ended:
            self._take(answer)
        return self.ended

    def _take(self, answer: dict[str, Any]) -> None:
        said, first = answer["meta_info"], self._seen
        ids = tuple(answer["output_ids"][first:])
        self._seen += len(ids)
        if not self.has_emitted:
            self.cached = said.get("cached_tokens") or 0
        ends = said.get("finish_reason")
        if self.stop.done() and ends is not None and ends["type"] == "abort":
            ends = None
        stop = next((place for place, id_ in enumerate(ids) if id_ in self._stops), None)
        if stop is not None:
            ids = ids[: stop + 1]
        logprobs = self._logprobs(said, first, len(ids))
        if any(math.isnan(entry.logprob) for entry in logprobs):
            self.corrupted()
            return
        shown = () if self.request.sampling.logprobs is None else logprobs
        if stop is not None:
            self.put(ids, shown, None, "stop")
        elif ends is None:
            if ids:
                self.put(ids, shown, None, None)
        elif ends["type"] == "length":
            self.put(ids, shown, None, "length")
        else:
            why = ends.get("message") or ends["type"]
            in_room = self.request.kv_room is not None and not self.has_emitted
            failed = lost(why) if in_room else EngineError(f"SGLang ended the request: {why}")
            self.put(ids, shown, None, "error", failed)

    def _logprobs(self, said: dict[str, Any], first: int, count: int) -> tuple[TokenLogprobs, ...]:
        """Of `count` tokens from `first` on.

        Each a list of logprob, id and nothing, the best beside it likewise.
        """
        chosen = said["output_token_logprobs"][first : first + count]
        best = (said.get("output_top_logprobs") or ())[first : first + count] or [()] * len(chosen)
        return tuple(
            TokenLogprobs(one[0], tuple((int(id_), value) for value, id_, _ in top or ()))
            for one, top in zip(chosen, best, strict=True)
        )
