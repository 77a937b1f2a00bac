"""One request under way: its output, its pages, and how far it has been computed.

Counters, no states.
"""

import time
from collections.abc import Iterator

from inlay.digest import BLOCK_SIZE, Chain
from inlay.engine.torch.cache.table import PageRun
from inlay.engine.torch.grammar.state import GrammarState
from inlay.engine.torch.lora import BASE
from inlay.errors import ErrorFrame, InlayError
from inlay.prompt import Prompt, Segment, Tokens
from inlay.request import (
    FinishReason,
    Output,
    PromptLogprobs,
    Request,
    Sampling,
    TokenLogprobs,
    Usage,
)


class Sequence:
    """Prompt and output as one run of positions, of which the first `computed` have keys and values in `pages`.

    Attributes:
        request: what was asked.
        prompt: the request's.
        output: ids so far, those of earlier attempts included.
        prompt_token_ids: ids of the prompt's token positions: what penalties may see.
        pages: a run of pages in each page group, all with the same end; `PageTable` alone changes
            them.
        computed: positions whose keys and values are, or were, in the pages, or will be when what
            is launched has run.
        pending: whether its next token is chosen on the device and not read yet.
        proven: page index up to which finite logits have come from the pages.
        taken: page index up to which it found pages in the cache since it started.
        cached_tokens: prompt positions that came from the prefix cache before the first preemption.
        scored: prompt positions whose logprobs have been told, or need not be.
        passed_over: steps in a row in which it wanted to go on and could not.
        waited: steps in which it could not, since its last token.
        turn_ends: output tokens up to which it has its turn, as `inlay.engine.torch.fairness` says.
        preemptions: how often its pages were taken away.
        order: (priority, arrival): who goes first; unique.
        expires: on the clock `Core.step` is given, or None.
        atomic: bounds of the segments that must not be split.
        grammar: where the output stands in the grammar the request asks for, if any.
        adapter: slot of the adapter that its next span goes through, or `lora.BASE`.
    """

    __slots__ = (
        "_admitted",
        "_announced",
        "_chain",
        "_prompt_length",
        "_queued",
        "adapter",
        "atomic",
        "cached_tokens",
        "expires",
        "grammar",
        "has_pending_token",
        "num_cached_pages",
        "num_computed_tokens",
        "num_verified_pages",
        "order",
        "output",
        "pages",
        "preemptions",
        "prompt",
        "prompt_token_ids",
        "request",
        "scored",
        "starved_steps",
        "turn_ends",
        "waited",
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
    ) -> None:
        """A sequence of which nothing is computed.

        Args:
            request: what was asked.
            arrival: counts up.
            chain: empty, rooted where the request's adapter and salt say; None when nothing of it
                may be cached.
            expires: when it must have ended.
            page_groups: how many there are.
            grammar: has read the earlier output.
        """
        self.request = request
        self.prompt: Prompt = request.prompt
        self.output: list[int] = list(request.prior_output)
        self.prompt_token_ids = self.prompt.token_ids()
        self.pages = tuple(PageRun() for _ in range(page_groups))
        self.num_computed_tokens = 0
        self.has_pending_token = False
        self.num_verified_pages = 0
        self.num_cached_pages = 0
        self.cached_tokens = 0
        self._admitted = time.monotonic()
        self._queued = 0.0
        self.starved_steps = 0
        self.waited = 0
        self.turn_ends = 0
        self.preemptions = 0
        self.order = (request.priority, arrival)
        self.expires = expires
        self.grammar = grammar
        self.adapter = BASE
        self.atomic = self.prompt.atomic_bounds()
        self._prompt_length = len(self.prompt)
        asks = request.sampling.prompt_logprobs is not None and not request.prior_output
        self.scored = 1 if asks else self._prompt_length
        self._chain = chain
        self._announced = False
        if chain is not None:
            chain.extend(self.prompt)
            chain.extend_tokens(self.output)

    def __repr__(self) -> str:
        return f"Sequence({self.request.id!r}, {self.num_computed_tokens}/{self.length})"

    @property
    def sampling(self) -> Sampling:
        """The request's."""
        return self.request.sampling

    @property
    def client(self) -> str | None:
        """The request's."""
        return self.request.client

    @property
    def in_turn(self) -> bool:
        """True if it runs beyond its client's share."""
        return len(self.output) < self.turn_ends

    @property
    def length(self) -> int:
        """Positions that are known: the prompt's and the output's."""
        return self._prompt_length + len(self.output)

    @property
    def num_pending_tokens(self) -> int:
        """Positions that can be computed before the next token is chosen, that of a pending one among them.

        0 only while it waits for what is launched: it could go no further, or must not.
        """
        goes_on = self.has_pending_token and len(self.output) + 1 < self.request.sampling.max_tokens
        return self.length + goes_on - self.num_computed_tokens

    @property
    def max_cacheable(self) -> int:
        """Positions at the front that need not be computed where their keys and values are cached.

        No logits of them are wanted.
        """
        return (self.length if self.scored >= self._prompt_length else self.scored) - 1

    def segments(self, start: int, stop: int) -> Iterator[tuple[int, Segment]]:
        """(first position, part) of each segment between positions `start` and `stop`.

        Output comes as tokens, if not pending.
        """
        base = self._prompt_length
        if start < base:
            yield from self.prompt.spans(start, min(stop, base))
        low = max(start, base)
        if min(stop, self.length) > low:
            yield low, Tokens(tuple(self.output[low - base : stop - base]))

    def page_digest(self, index: int, page_size: int) -> bytes | None:
        """The digest of everything up to the end of page `index`.

        None when that is not known yet, or never cached.
        """
        if self._chain is None:
            return None
        block = (index + 1) * (page_size // BLOCK_SIZE) - 1
        return self._chain.blocks[block] if block < len(self._chain.blocks) else None

    def start(self) -> None:
        """It takes part in steps from now on; how long it waited for that is told in its usage."""
        if not self._queued:
            self._queued = time.monotonic() - self._admitted

    def blocks(self, start: int, stop: int) -> list[bytes]:
        """The digests of blocks `start` to `stop` of the chain; none where nothing is cached."""
        return [] if self._chain is None else self._chain.blocks[start:stop]

    def append(self, token_id: int) -> None:
        """Take the next output token."""
        self.has_pending_token = False
        self.waited = 0
        self.output.append(token_id)
        if self._chain is not None:
            self._chain.extend_tokens((token_id,))

    def finish_reason(self, eos_token_ids: tuple[int, ...]) -> FinishReason | None:
        """Why the output as it stands is over, or None."""
        sampling = self.request.sampling
        if self.output:
            last = self.output[-1]
            if last in sampling.stop_token_ids or (
                not sampling.ignore_eos and last in eos_token_ids
            ):
                return "stop"
        over = len(self.output) >= sampling.max_tokens and self.scored >= self._prompt_length
        return "length" if over else None

    def make_output(
        self,
        *,
        new: int = 0,
        logprobs: tuple[TokenLogprobs, ...] = (),
        finish_reason: FinishReason | None = None,
        error: InlayError | None = None,
        prompt_logprobs: PromptLogprobs | None = None,
    ) -> Output:
        """What to tell of the last `new` output tokens, and of the end.

        Args:
            new: how many tokens at the end of the output have not been told.
            logprobs: theirs.
            finish_reason: set on the last output.
            error: why it failed; then the finish reason is "error".
            prompt_logprobs: of prompt positions that have not been told.
        """
        offset = len(self.output) - new
        reason: FinishReason | None = "error" if error is not None else finish_reason
        usage = None
        if reason is not None or not self._announced:
            usage = Usage(self._prompt_length, len(self.output), self.cached_tokens, self._queued)
        self._announced = True
        return Output(
            request_id=self.request.id,
            attempt=self.request.attempt,
            offset=offset,
            token_ids=tuple(self.output[offset:]),
            logprobs=logprobs,
            finish_reason=reason,
            stop_token_id=self.output[-1] if reason == "stop" and new else None,
            usage=usage,
            error=None if error is None else ErrorFrame.of(error),
            prompt_logprobs=prompt_logprobs,
        )


__all__ = ["Sequence"]
