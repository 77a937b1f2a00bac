"""A step under way: the device has been told what to do, and the host has not read what came of it."""

from collections.abc import Iterable
from collections.abc import Sequence as Run
from itertools import chain, islice
from typing import NamedTuple

import torch
from torch import Tensor

from inlay.engine.torch.native import kernels
from inlay.engine.torch.prompt_logprobs import Scored
from inlay.engine.torch.sampling.sampler import SampledToken, SampledTokens
from inlay.engine.torch.scheduler import ScheduledChunk
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.transfers import Download, upload
from inlay.errors import InlayError
from inlay.request import PromptLogprobs


class SpanResult(NamedTuple):
    """What a step says of one of its spans.

    Attributes:
        good: whether all that was computed is finite.
        scores: logprobs of its prompt, if it asked for any.
        choice: the next token, or why there is none; None where none was to be chosen.
    """

    good: bool
    scores: PromptLogprobs | None
    choice: SampledToken | InlayError | None


class InFlightStep:
    """What a step computes and chooses, on its way to the host.

    Nothing here waits for the device but `read`.

    Attributes:
        spans: of its plan.
        sampling: those of them that yield a next token.
        logits: [spans that sample, vocab_size], valid until the next step is launched.
        retracted: spans of `sampling` nothing is chosen from yet.
        failures: why nothing can be chosen from a span.
    """

    __slots__ = (
        "_drawn",
        "_finite",
        "_scores",
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
    ) -> None:
        """A step whose model is launched.

        Args:
            spans: what it computes.
            hidden: [T, C], the states of all their positions in order.
            logits: [spans that sample, vocab_size].
            scores: of prompts.
        """
        self.chunks = spans
        self.sampling = [span for span in spans if span.samples]
        self.logits = logits
        self.retracted: set[ScheduledChunk] = set()
        self.failures: dict[ScheduledChunk, InlayError] = {}
        self._finite = Download(finite(hidden), finite(logits))
        self._scores = scores
        self._drawn: list[tuple[Run[ScheduledChunk], SampledTokens]] = []

    def choose(self, spans: Run[ScheduledChunk], drawn: SampledTokens) -> None:
        """What follows `spans` is chosen: their sequences have a pending token each."""
        self._drawn.append((spans, drawn))
        for span in spans:
            span.sequence.has_pending_token = True

    def chosen(self, sequences: Iterable[Sequence]) -> Tensor:
        """[N] int64, on the device: the tokens chosen for `sequences`, which may be unread."""
        spans = chain.from_iterable(spans for spans, _ in self._drawn)
        places = {span.sequence: place for place, span in enumerate(spans)}
        ids = torch.cat([drawn.ids for _, drawn in self._drawn])
        return ids[upload(torch.tensor([places[sequence] for sequence in sequences]), ids.device)]

    def read(self) -> dict[ScheduledChunk, SpanResult]:
        """What came of each span. Waits for the device."""
        hidden, logits = (flags.tolist() for flags in self._finite.wait())
        states, sampled = iter(hidden), iter(logits)
        choices: dict[ScheduledChunk, SampledToken | InlayError] = dict(self.failures)
        for spans, drawn in self._drawn:
            choices.update(zip(spans, drawn.read(), strict=True))
        found: dict[ScheduledChunk, SpanResult] = {}
        for span in self.chunks:
            # A value that is not finite spoils the whole span, its tokens before that value too
            # (zero times NaN is NaN), and others share the pages of tokens as soon as they are
            # committed.
            good = [*islice(states, span.count), *islice(sampled, span.samples)]
            scores = None
            if span in self._scores:
                scores = self._scores[span].read()
                good.append(scores is not None)
            found[span] = SpanResult(all(good), scores, choices.get(span))
        return found


def finite(rows: Tensor) -> Tensor:
    """Bool [N]: whether all of each of the rows [N, W] is finite."""
    native = kernels() if rows.device.type == "cpu" and rows.is_contiguous() else None
    if native is not None and native.serve(rows.dtype):
        return native.finite(rows)
    low, high = rows.aminmax(dim=-1)
    return low.isfinite() & high.isfinite()


__all__ = ["InFlightStep", "SpanResult", "finite"]
