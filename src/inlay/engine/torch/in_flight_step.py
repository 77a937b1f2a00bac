"""A launched step whose results the host has not read yet, and what it gives."""

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Run
from dataclasses import dataclass, field
from itertools import islice

import torch
from torch import Tensor

from inlay.base.errors import InlayError
from inlay.engine.torch.hidden_states import ChunkStates, Recorder
from inlay.engine.torch.native import kernels
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.prompt_logprobs import Scored
from inlay.engine.torch.sampling.chooser import ChosenTokens
from inlay.engine.torch.sampling.sampler import SampledToken
from inlay.engine.torch.sequence import Sequence
from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.transfers import Download, upload
from inlay.messages.request import PromptLogprobs


@dataclass(slots=True, eq=False)
class TokenRun:
    """Result of one chunk of a step.

    Attributes:
        chunk: the chunk.
        tokens: next tokens of its sequence, in order; without drafts, at most one. All but the last
            are drafts.
        error: why no token could be sampled after them, or None.
        finite: all computed values are finite. Else there are no tokens.
        unscheduled: its last position is computed again, for its logits.
        scores: logprobs of its prompt, if requested.
        states: hidden states, if requested.
    """

    chunk: ScheduledChunk
    tokens: list[SampledToken] = field(default_factory=list)
    error: InlayError | None = None
    finite: bool = True
    unscheduled: bool = False
    scores: PromptLogprobs | None = None
    states: ChunkStates | None = None

    @property
    def accepted(self) -> int:
        """Number of drafts among the tokens."""
        return max(0, len(self.tokens) - 1)


class InFlightStep:
    """Results of a step on their way to the host.

    Only `read` waits for the device.

    Attributes:
        chunks: chunks of the step.
        sampling: those that sample a next token.
        has_drafts: any of them has drafts.
        logits: [sampled positions, vocab_size], of `sampling` in order; valid until the next step
            is launched.
        chosen: the tokens sampled after chunks; None before any are.
    """

    __slots__ = (
        "_finite",
        "_rows",
        "_scores",
        "_states",
        "chosen",
        "chunks",
        "has_drafts",
        "logits",
        "sampling",
    )

    def __init__(
        self,
        chunks: Run[ScheduledChunk],
        hidden: Tensor,
        logits: Tensor,
        scores: Mapping[ScheduledChunk, Scored],
        states: Recorder | None = None,
    ) -> None:
        """Start with a step whose model is launched.

        Args:
            chunks: chunks of the step.
            hidden: [T, C], the states of all their positions in order.
            logits: [sampled positions, vocab_size].
            scores: logprobs of prompts.
            states: hidden states that were recorded, if any.
        """
        self.chunks = chunks
        self.sampling = [chunk for chunk in chunks if chunk.samples]
        self.logits = logits
        self.chosen: ChosenTokens | None = None
        self._rows: dict[ScheduledChunk, int] = {}
        row = 0
        for chunk in self.sampling:
            self._rows[chunk] = row
            row += chunk.num_sampled
        self.has_drafts = row > len(self.sampling)
        self._finite = Download(finite(hidden), finite(logits))
        self._scores = scores
        self._states = states

    def logits_of(self, chunks: Run[ScheduledChunk], place: int) -> Tensor:
        """Return the logits [len(chunks), vocab_size] after a position of each of `chunks`.

        `place` is 0 for the last known position, 1 for the first draft, and so on.
        """
        if not place and len(chunks) == len(self.logits):
            return self.logits
        rows = torch.tensor([self._rows[chunk] + place for chunk in chunks], dtype=torch.int64)
        return self.logits[upload(rows, self.logits.device)]

    def num_confirmed(self, accepted: Mapping[ScheduledChunk, int]) -> list[int]:
        """Return how many of the uncertain positions of each chunk are not computed again.

        `accepted` are drafts that became output.
        """
        late = () if self.chosen is None else self.chosen.late
        return [
            chunk.num_uncertain - len(chunk.drafts) + accepted.get(chunk, 0) - (chunk in late)
            for chunk in self.chunks
        ]

    def choose(self, chosen: ChosenTokens) -> None:
        """Record the tokens sampled after chunks: their sequences now have a pending token."""
        self.chosen = chosen
        for chunks, _ in chosen.drawn:
            for chunk in chunks:
                chunk.sequence.has_pending_token = True

    def pending(self, sequences: Iterable[Sequence]) -> Tensor:
        """Return [N] int64 on the device: the tokens sampled for `sequences`, perhaps unread."""
        drawn = [] if self.chosen is None else self.chosen.drawn
        chunks = [chunk for chunks, _ in drawn for chunk in chunks]
        places = {chunk.sequence: place for place, chunk in enumerate(chunks)}
        ids = torch.cat([tokens.ids for _, tokens in drawn])
        return ids[upload(torch.tensor([places[sequence] for sequence in sequences]), ids.device)]

    def read(self) -> list[TokenRun]:
        """Return what each chunk gives of a sequence that has not ended. Waits for the device."""
        hidden, logits = (flags.tolist() for flags in self._finite.wait())
        chosen = ChosenTokens() if self.chosen is None else self.chosen
        choices = chosen.read()
        runs = [TokenRun(chunk) for chunk in self.chunks]
        if not (all(hidden) and all(logits)):
            # One non-finite value invalidates the whole chunk, earlier tokens included (zero times
            # NaN is NaN), as committed tokens may share their pages at once.
            states, sampled = iter(hidden), iter(logits)
            for run in runs:
                count, num_sampled = run.chunk.count, run.chunk.num_sampled
                run.finite = all([*islice(states, count), *islice(sampled, num_sampled)])
        for run in runs if self._scores else ():
            if run.chunk in self._scores:
                run.scores = self._scores[run.chunk].read()
                run.finite &= run.scores is not None
        for chunk, states_of in ({} if self._states is None else self._states.read()).items():
            runs[self.chunks.index(chunk)].states = states_of
        for run in runs if chosen.late else ():
            run.unscheduled = run.chunk in chosen.late
        runs = [run for run in runs if not run.chunk.sequence.ended]
        for run in runs:
            choice = choices.get(run.chunk)
            if choice is None or not run.finite:
                continue
            if isinstance(choice, InlayError):
                run.error = choice
            else:
                run.tokens.append(choice)
        return runs


class Lookahead:
    """Which launched step is read now: this one, or with overlap the one before.

    Depth 0 and no drafts: one token at a time. Depth 1: the device computes a step while the host
    reads the last. With drafts the depth is 0, as they follow from what was read.

    Attributes:
        depth: launched steps that may stay unread, 0 or 1.
        speculator: drafts tokens, or None.
        unread: the launched step that is read next, or None.
    """

    def __init__(self, *, overlap: bool, speculator: Speculator | None = None) -> None:
        self.depth = int(overlap and speculator is None)
        self.speculator = speculator
        self.unread: InFlightStep | None = None

    def push(self, flight: InFlightStep | None) -> InFlightStep | None:
        """Take a launched step, or None if none was; return the one to read now, or None."""
        if not self.depth:
            return flight
        done, self.unread = self.unread, flight
        return done


def finite(rows: Tensor) -> Tensor:
    """Return bool [N]: True for rows [N, W] that are wholly finite."""
    native = kernels() if rows.device.type == "cpu" and rows.is_contiguous() else None
    if native is not None and native.serve(rows.dtype):
        return native.finite(rows)
    low, high = rows.aminmax(dim=-1)
    return low.isfinite() & high.isfinite()
