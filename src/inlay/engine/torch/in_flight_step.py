"""A launched step whose results the host has not read yet."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Run
from itertools import accumulate, chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.hidden_states import Recorder, SpanStates
from inlay.engine.torch.native import kernels
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.prompt_logprobs import Scored
from inlay.engine.torch.sampling.chooser import ChosenTokens
from inlay.engine.torch.sampling.sampler import SampledToken
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.transfers import Download, upload
from inlay.errors import InlayError
from inlay.request import PromptLogprobs


class SpanResult(NamedTuple):
    """Result of one span of a step.

    Attributes:
        good: True if all computed values are finite.
        scores: logprobs of its prompt, if requested.
        choice: the next token, or the reason why there is none; None if nothing was sampled.
        states: hidden states, if requested.
    """

    good: bool
    scores: PromptLogprobs | None
    choice: SampledToken | InlayError | None
    states: SpanStates | None


class InFlightStep:
    """Results of a step on their way to the host.

    Only `read` waits for the device.

    Attributes:
        spans: spans of the step.
        sampling: the spans that sample a next token.
        logits: [sampled positions, vocab_size], of `sampling` in order; valid until the next step
            is launched.
        retracted: spans of `sampling` from which nothing is sampled yet.
    """

    __slots__ = (
        "_chosen",
        "_finite",
        "_rows",
        "_scores",
        "_states",
        "chunks",
        "logits",
        "retracted",
        "sampling",
    )

    def __init__(
        self,
        spans: Run[ScheduledChunk],
        hidden: Tensor,
        logits: Tensor,
        scores: dict[ScheduledChunk, Scored],
        states: Recorder | None = None,
    ) -> None:
        """Start with a step whose model is launched.

        Args:
            spans: spans of the step.
            hidden: [T, C], the states of all their positions in order.
            logits: [sampled positions, vocab_size].
            scores: logprobs of prompts.
            states: hidden states that were recorded, if any.
        """
        self.chunks = spans
        self.sampling = [span for span in spans if span.samples]
        self.logits = logits
        self.retracted: set[ScheduledChunk] = set()
        self._chosen = ChosenTokens()
        starts = accumulate((span.num_sampled for span in self.sampling), initial=0)
        self._rows = dict(zip(self.sampling, starts, strict=False))
        self._finite = Download(finite(hidden), finite(logits))
        self._scores = scores
        self._states = states

    def logits_of(self, spans: Run[ScheduledChunk], place: int) -> Tensor:
        """Return the logits [len(spans), vocab_size] after a position of each of `spans`.

        `place` is 0 for the last known position, 1 for the first draft, and so on.
        """
        if not place and len(spans) == len(self.logits):
            return self.logits
        rows = torch.tensor([self._rows[span] + place for span in spans], dtype=torch.int64)
        return self.logits[upload(rows, self.logits.device)]

    def kept(self, accepted: Mapping[ScheduledChunk, int]) -> list[int]:
        """Return how many of the uncertain positions of each chunk are not computed again."""
        return [
            chunk.num_uncertain
            - len(chunk.drafts)
            + accepted.get(chunk, 0)
            - (chunk in self.retracted)
            for chunk in self.chunks
        ]

    def choose(self, chosen: ChosenTokens) -> None:
        """Record the tokens sampled after spans: their sequences now have a pending token."""
        self._chosen = chosen
        for spans, _ in chosen.drawn:
            for span in spans:
                span.sequence.has_pending_token = True

    def chosen(self, sequences: Iterable[Sequence]) -> Tensor:
        """Return [N] int64 on the device: the tokens sampled for `sequences`, perhaps unread."""
        drawn = self._chosen.drawn
        spans = chain.from_iterable(spans for spans, _ in drawn)
        places = {span.sequence: place for place, span in enumerate(spans)}
        ids = torch.cat([tokens.ids for _, tokens in drawn])
        return ids[upload(torch.tensor([places[sequence] for sequence in sequences]), ids.device)]

    def read(self) -> dict[ScheduledChunk, SpanResult]:
        """Return the result of each span. Waits for the device."""
        hidden, logits = (flags.tolist() for flags in self._finite.wait())
        states, sampled = iter(hidden), iter(logits)
        choices = self._chosen.read()
        recorded = {} if self._states is None else self._states.read()
        found: dict[ScheduledChunk, SpanResult] = {}
        for span in self.chunks:
            # One non-finite value invalidates the whole span, earlier tokens included (zero times
            # NaN is NaN), as committed tokens may share their pages at once.
            good = [*islice(states, span.count), *islice(sampled, span.num_sampled)]
            scores = None
            if span in self._scores:
                scores = self._scores[span].read()
                good.append(scores is not None)
            found[span] = SpanResult(all(good), scores, choices.get(span), recorded.get(span))
        return found


def finite(rows: Tensor) -> Tensor:
    """Return bool [N]: True for rows [N, W] that are wholly finite."""
    native = kernels() if rows.device.type == "cpu" and rows.is_contiguous() else None
    if native is not None and native.serve(rows.dtype):
        return native.finite(rows)
    low, high = rows.aminmax(dim=-1)
    return low.isfinite() & high.isfinite()
