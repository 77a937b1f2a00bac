"""A running or waiting request: its output, its pages, and the number of computed tokens.

It has counters, no states.
"""

import time
from collections import deque
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from inlay.base.errors import ErrorFrame, InlayError
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.grammar.state import GrammarState
from inlay.engine.torch.lora import BASE
from inlay.engine.torch.needs import Need
from inlay.engine.torch.prompt_media import PromptMedia, RopePositions
from inlay.messages.digest import BLOCK_SIZE, Chain
from inlay.messages.priority import BACKGROUND
from inlay.messages.prompt import Media, Prompt, Segment, Tokens
from inlay.messages.request import (
    EngineUsage,
    FinishReason,
    Output,
    Payload,
    PromptLogprobs,
    Request,
    Sampling,
    TokenLogprobs,
)

if TYPE_CHECKING:
    from inlay.engine.torch.plan import ScheduledChunk

GREEDY_BELOW = 1e-5
"""Temperatures below this are greedy, as in vLLM."""


class Sequence:
    """Prompt and output as one run of positions.

    The first `num_computed_tokens` have keys and values in `pages`.

    Attributes:
        request: the request.
        client: the request's.
        prompt: the request's prompt.
        prompt_length: its positions.
        output: output ids so far, those of earlier attempts included; `append` adds to them.
        length: number of known positions, prompt and output.
        prompt_token_ids: ids of the prompt's token positions, for penalties.
        pages: a run of pages in each page group, all with the same end; only `PageTable` changes
            them.
        num_computed_tokens: positions whose keys and values are, or were, in the pages, or will be
            when the launched steps have run.
        has_pending_token: True if its next token is sampled on the device and not read yet.
        pending: `num_pending_tokens` when the plan in the making was begun.
        planned_in: number of the last plan that has a chunk of it, or for which it was preempted.
        unread: chunks of it that are planned, and whose results are not committed, in order.
        num_verified_pages: page index up to which the pages gave finite logits.
        cached: while nothing of it is computed, the pages from its first on that were found cached,
            for each page group without a window.
        looked_up_at: `PrefixCache.num_forgotten` when they were.
        cached_tokens: prompt positions that came from the prefix cache before the first preemption.
        scored: prompt positions whose logprobs were emitted, or are not wanted.
        starved_steps: consecutive steps in which it could not be scheduled for lack of room.
        waited: such steps since its last token.
        wanted_states: positions whose hidden states are to be emitted; from the first of them on
            nothing comes from the cache.
        protected_until: output length at which its turn ends, as in `inlay.engine.torch.fairness`.
        preemptions: number of preemptions.
        order: (priority, arrival), the scheduling order; unique.
        is_background: it gives way to all that are not.
        expires: deadline on the clock of `Core.expire`, or None.
        atomic: bounds of segments that must not be split.
        grammar: state of the output in the request's grammar, if any.
        adapter: slot of the adapter for its next chunk, or `lora.BASE`.
        media: the prompt's images and their rows, or None if it has none.
        paused: nothing is computed for it until what it has made is used.
        needs: what it waits for before it is started.
        admitted: the scheduler knows it, as it needs nothing any more that it needed at first.
        may_restore: it was preempted, and has not asked for what is kept of its pages.
        ended: its last output was made.
        is_plain: the likeliest token by the model's own logits is the next one, once its output has
            `min_tokens`.
        asks_more: it has an adapter or a grammar, or wants hidden states, or logprobs of its prompt
            or of named ids.
    """

    __slots__ = (
        "_admitted",
        "_announced",
        "_chain",
        "_queued",
        "_rope",
        "adapter",
        "admitted",
        "asks_more",
        "atomic",
        "cached",
        "cached_tokens",
        "client",
        "ended",
        "expires",
        "grammar",
        "has_pending_token",
        "is_background",
        "is_plain",
        "length",
        "looked_up_at",
        "may_restore",
        "media",
        "needs",
        "num_computed_tokens",
        "num_verified_pages",
        "order",
        "output",
        "pages",
        "paused",
        "pending",
        "planned_in",
        "preemptions",
        "prompt",
        "prompt_length",
        "prompt_token_ids",
        "protected_until",
        "request",
        "sampling",
        "scored",
        "starved_steps",
        "unread",
        "waited",
        "wanted_states",
    )

    def __init__(
        self,
        request: Request,
        *,
        arrival: int,
        chain: Chain | None = None,
        expires: float | None = None,
        page_groups: int = 1,
        grammar: GrammarState | None = None,
        rope: RopePositions | None = None,
    ) -> None:
        """Start with nothing computed.

        Args:
            request: the request.
            arrival: increasing number.
            chain: empty chain for the request's adapter and salt; None if nothing of it may be
                cached.
            expires: deadline, or None.
            page_groups: number of page groups.
            grammar: state after the earlier output.
            rope: rotary positions, for models that number positions by three axes.
        """
        self.request = request
        self.client = request.client
        self.prompt: Prompt = request.prompt
        self.sampling: Sampling = request.sampling
        self.output: list[int] = list(request.prior_output)
        self.prompt_token_ids = self.prompt.token_ids()
        self.pages = tuple(PageRun() for _ in range(page_groups))
        self.num_computed_tokens = 0
        self.has_pending_token = False
        self.paused = False
        self.needs: set[Need] = set()
        self.admitted = False
        self.may_restore = False
        self.ended = False
        self.pending = 0
        self.planned_in = 0
        self.unread: deque[ScheduledChunk] = deque()
        self.num_verified_pages = 0
        self.forget_cached()
        self.looked_up_at = 0
        self.cached_tokens = 0
        self._admitted = time.monotonic()
        self._queued = 0.0
        self.starved_steps = 0
        self.waited = 0
        self.protected_until = 0
        self.preemptions = 0
        self.order = (request.priority, arrival)
        self.is_background = request.priority >= BACKGROUND
        self.expires = expires
        self.grammar = grammar
        self.adapter = BASE
        self.atomic = self.prompt.atomic_bounds()
        self.media = PromptMedia.of(self.prompt) if self.prompt.has_rows else None
        self._rope = rope
        self.prompt_length = len(self.prompt)
        self.length = self.prompt_length + len(self.output)
        asks = request.sampling.prompt_logprobs is not None and not request.prior_output
        self.scored = 1 if asks else self.prompt_length
        states = request.sampling.hidden_states
        self.wanted_states = (
            range(0)
            if states is None
            else states.positions(self.prompt_length, request.sampling.max_tokens)
        )
        self._chain = chain
        self._announced = False
        if chain is not None:
            chain.extend(self.prompt)
        sampling = request.sampling
        self.is_plain = grammar is None and is_plain(sampling)
        self.asks_more = (
            request.adapter is not None
            or grammar is not None
            or sampling.grammar is not None
            or sampling.prompt_logprobs is not None
            or bool(sampling.logprob_token_ids)
            or states is not None
        )

    def __repr__(self) -> str:
        return f"Sequence({self.request.id!r}, {self.num_computed_tokens}/{self.length})"

    @property
    def is_protected(self) -> bool:
        """True if it may run beyond its client's share."""
        return len(self.output) < self.protected_until

    @property
    def waits(self) -> bool:
        """True if it waits for what it needs, or for use of its output."""
        return self.paused or bool(self.needs)

    @property
    def num_pending_tokens(self) -> int:
        """Number of positions to compute before the next token is sampled.

        The position of a pending token is one of them.

        0 only while it waits for launched steps, or is paused.
        """
        if self.paused:
            return 0
        goes_on = self.has_pending_token and len(self.output) + 1 < self.sampling.max_tokens
        return self.length + goes_on - self.num_computed_tokens

    @property
    def max_cacheable(self) -> int:
        """Number of leading positions that may come from the cache.

        Their logits are not needed.
        """
        most = (self.length if self.scored >= self.prompt_length else self.scored) - 1
        return min(most, self.wanted_states.start) if self.wanted_states else most

    def segments(self, start: int, stop: int) -> list[tuple[int, Segment]]:
        """Return (first position, part) of each segment between positions `start` and `stop`.

        Output ids are tokens; a pending one is left out. Media are rows.
        """
        base = self.prompt_length
        parts = self.prompt_segments(start, stop) if start < base else []
        if known := self.output[max(0, start - base) : max(0, stop - base)]:
            parts.append((max(start, base), Tokens(tuple(known))))
        return parts

    def prompt_segments(self, start: int, stop: int) -> list[tuple[int, Segment]]:
        """Return as `segments`, of the prompt alone."""
        spans = self.prompt.spans(start, min(stop, self.prompt_length))
        if self.media is None:
            return list(spans)
        return [
            (first, self.media.rows(segment) if isinstance(segment, Media) else segment)
            for first, segment in spans
        ]

    def rope(self, start: int, stop: int) -> npt.NDArray[np.int64] | None:
        """Return the rotary positions [3, stop - start], or None where they are the positions."""
        return None if self._rope is None else self._rope.between(start, stop)

    def atomic_spans(self, start: int, stop: int) -> list[tuple[int, int]]:
        """Return the bounds of the atomic segments between two positions."""
        return [bounds for bounds in self.atomic if start <= bounds[0] and bounds[1] <= stop]

    def page_digest(self, index: int, page_size: int) -> bytes | None:
        """Return the digest of everything up to the end of page `index`.

        None if it is not known yet, or must not be cached.
        """
        if self._chain is None:
            return None
        block = (index + 1) * (page_size // BLOCK_SIZE) - 1
        if block >= len(self._chain.blocks):
            self._extend_chain(self._chain)
        return self._chain.blocks[block] if block < len(self._chain.blocks) else None

    def _extend_chain(self, chain: Chain) -> None:
        """Take the output ids since the last time. Not with each token: a page takes many."""
        if chain.length < self.length:
            chain.extend_tokens(self.output[chain.length - self.prompt_length :])

    def start(self) -> None:
        """Mark it as scheduled for the first time; its time in the queue goes into its usage."""
        if not self._queued:
            self._queued = time.monotonic() - self._admitted

    def forget_cached(self) -> None:
        """Nothing is known any more of its cached pages."""
        self.cached: tuple[list[int], ...] = tuple([] for _ in self.pages)

    def begin_again(self) -> None:
        """Nothing of it is computed any more: it was preempted."""
        self.num_computed_tokens = 0
        self.num_verified_pages = 0
        self.starved_steps = 0
        self.preemptions += 1

    def blocks(self, start: int, stop: int) -> list[bytes]:
        """Return the digests of blocks `start` to `stop`; empty if caching is not allowed."""
        if self._chain is None:
            return []
        self._extend_chain(self._chain)
        return self._chain.blocks[start:stop]

    def append(self, token_id: int) -> None:
        """Append the next output token."""
        self.has_pending_token = False
        self.waited = 0
        self.output.append(token_id)
        self.length += 1

    def finish_reason(self, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Return the finish reason of the output so far, or None."""
        sampling = self.sampling
        if self.output:
            last = self.output[-1]
            if last in sampling.stop_token_ids or (
                not sampling.ignore_eos and last in eos_token_ids
            ):
                return "stop"
        told = self.scored >= self.prompt_length and not (
            self.wanted_states and self.wanted_states.start < self.prompt_length
        )
        return "length" if len(self.output) >= sampling.max_tokens and told else None

    def make_output(
        self,
        *,
        new: int = 0,
        untold: int = 0,
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish_reason: FinishReason | None = None,
        error: InlayError | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
        payloads: tuple[Payload, ...] = (),
    ) -> Output:
        """Return the output with the last `new` tokens, and perhaps the end: an `error` is one.

        Its last `untold` tokens are those of a later output.
        """
        stop = len(self.output) - untold
        offset = stop - new
        reason: FinishReason | None = "error" if error is not None else finish_reason
        usage = None
        if reason is not None or not self._announced:
            usage = EngineUsage(self.prompt_length, stop, self.cached_tokens, self._queued)
        self._announced = True
        return Output(
            request_id=self.request.id,
            attempt=self.request.attempt,
            offset=offset,
            token_ids=tuple(self.output[offset:stop]),
            logprobs=logprobs,
            finish_reason=reason,
            stop_token_id=self.output[-1] if reason == "stop" and new else None,
            usage=usage,
            error=None if error is None else ErrorFrame.of(error),
            prompt_logprobs=prompt_logprobs,
            payloads=payloads,
        )


def is_greedy(sampling: Sampling) -> bool:
    """Return True if tokens are not drawn."""
    return sampling.temperature < GREEDY_BELOW


def penalises(sampling: Sampling) -> bool:
    """Return True if logits depend on the tokens before them."""
    return (
        sampling.repetition_penalty != 1.0
        or sampling.frequency_penalty != 0.0
        or sampling.presence_penalty != 0.0
    )


def is_plain(sampling: Sampling) -> bool:
    """Return True if greedy choice from the model's logits is enough after `min_tokens`."""
    return (
        is_greedy(sampling)
        and sampling.logprobs is None
        and not (penalises(sampling) or sampling.logit_bias or sampling.bad_words)
        and sampling.allowed_token_ids is None
        and sampling.thinking is None
        and sampling.grammar is None
    )
