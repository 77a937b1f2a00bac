"""A launched step whose results the host has not read yet."""

from collections.abc import Iterable
from collections.abc import Sequence as Run
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.hidden_states import Recorder, SpanStates
from inlay.engine.torch.native import kernels
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.prompt_logprobs import Scored
from inlay.engine.torch.sampling.sampler import SampledToken, SampledTokens
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
        logits: [spans that sample, vocab_size], valid until the next step is launched.
        retracted: spans of `sampling` from which nothing is sampled yet.
        failures: errors of spans from which nothing can be sampled.
    """

    __slots__ = (
        "_drawn",
        "_finite",
        "_scores",
        "_states",
        "chunks",
        "failures",
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
            logits: [spans that sample, vocab_size].
            scores: logprobs of prompts.
            states: hidden states that were recorded, if any.
        """
        self.chunks = spans
        self.sampling = [span for span in spans if span.samples]
        self.logits = logits
        self.retracted: set[ScheduledChunk] = set()
        self.failures: dict[ScheduledChunk, InlayError] = {}
        self._finite = Download(finite(hidden), finite(logits))
        self._scores = scores
        self._states = states
        self._drawn: list[tuple[Run[ScheduledChunk], SampledTokens]] = []

    def choose(self, spans: Run[ScheduledChunk], drawn: SampledTokens) -> None:
        """Record the tokens sampled after `spans`: their sequences now have a pending token."""
        self._drawn.append((spans, drawn))
        for span in spans:
            span.sequence.has_pending_token = True

    def chosen(self, sequences: Iterable[Sequence]) -> Tensor:
        """Return [N] int64 on the device: the tokens sampled for `sequences`, perhaps unread."""
        spans = chain.from_iterable(spans for spans, _ in self._drawn)
        places = {span.sequence: place for place, span in enumerate(spans)}
        ids = torch.cat([drawn.ids for _, drawn in self._drawn])
        return ids[upload(torch.tensor([places[sequence] for sequence in sequences]), ids.device)]

    def read(self) -> dict[ScheduledChunk, SpanResult]:
        """Return the result of each span. Waits for the device."""
        hidden, logits = (flags.tolist() for flags in self._finite.wait())
        states, sampled = iter(hidden), iter(logits)
        choices: dict[ScheduledChunk, SampledToken | InlayError] = dict(self.failures)
        for spans, drawn in self._drawn:
            choices.update(zip(spans, drawn.read(), strict=True))
        recorded = {} if self._states is None else self._states.read()
        found: dict[ScheduledChunk, SpanResult] = {}
        for span in self.chunks:
            # One non-finite value invalidates the whole span, earlier tokens included (zero times
            # NaN is NaN), as committed tokens may share their pages at once.
            good = [*islice(states, span.count), *islice(sampled, span.samples)]
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


__all__ = ["InFlightStep", "SpanResult", "finite"]
