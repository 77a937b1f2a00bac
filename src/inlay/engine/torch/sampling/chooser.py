"""`TokenChooser`: the next tokens of chunks, by the sampler and the masks of grammars."""

import logging
from collections.abc import Iterable
from collections.abc import Sequence as Run
from dataclasses import dataclass, field
from operator import attrgetter

from torch import Tensor

from inlay.base.errors import EngineError, InlayError
from inlay.engine.torch.grammar.masks import Masks
from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.sampling.sampler import SampledToken, SampledTokens, Sampler
from inlay.engine.torch.sequence import Sequence

log = logging.getLogger(__name__)

_grammar_of = attrgetter("grammar")


@dataclass(slots=True)
class ChosenTokens:
    """Next tokens, perhaps not yet read from the device.

    Attributes:
        drawn: chunks, and the tokens after them.
        failures: errors of chunks after which none can be sampled.
        late: chunks whose grammar's mask is not ready; nothing is sampled.
    """

    drawn: list[tuple[Run[ScheduledChunk], SampledTokens]] = field(default_factory=list)
    failures: dict[ScheduledChunk, InlayError] = field(default_factory=dict)
    late: list[ScheduledChunk] = field(default_factory=list)

    def read(self) -> dict[ScheduledChunk, SampledToken | InlayError]:
        """Return the token after each chunk, or why there is none. Waits for the device."""
        found: dict[ScheduledChunk, SampledToken | InlayError] = dict(self.failures)
        for chunks, tokens in self.drawn:
            found.update(zip(chunks, tokens.read(), strict=True))
        return found


class TokenChooser:
    """Samples with the masks of grammars, which are computed on threads of their own."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._masks = Masks()

    def close(self) -> None:
        """Stop the threads."""
        self._masks.close()

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of `sequence`, if any."""
        if not sequence.is_plain or sequence.sampling.min_tokens:
            self._sampler.forget(sequence)
        if sequence.grammar is not None:
            self._masks.drop(sequence)

    def begin_masks(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Begin to compute the masks for the tokens after `chunks`."""
        bound = [chunk.sequence for chunk in chunks if chunk.sequence.grammar is not None]
        if bound:
            self._masks.begin_masks(bound)

    def expect(self, sequence: Sequence) -> None:
        """Begin to compute the mask for the next token of `sequence`, which is not planned yet."""
        if sequence.grammar is not None:
            self._masks.begin_masks([sequence])

    def choose(
        self, logits: Tensor, chunks: Run[ScheduledChunk], until: float | None = None
    ) -> ChosenTokens:
        """Sample the next token of the sequence of each of `chunks`; all earlier ones are known.

        `logits` are [len(chunks), vocab_size]. After drafts, masks are waited for `until` a moment.
        """
        chosen = ChosenTokens()
        late: dict[Sequence, InlayError | None] = {}
        sequences = [chunk.sequence for chunk in chunks]
        if any(map(_grammar_of, sequences)):
            self._masks.begin_masks(sequences)
            late = self._masks.late(sequences, until)
        for chunk in chunks if late else ():
            if chunk.sequence in late:
                error = late[chunk.sequence]
                if error is None:
                    chosen.late.append(chunk)
                else:
                    chosen.failures[chunk] = error
        if late:
            rows = [row for row, chunk in enumerate(chunks) if chunk.sequence not in late]
            chunks, logits = [chunks[row] for row in rows], logits[rows]
        if chunks:
            self._draw(logits, chunks, chosen)
        return chosen

    def _draw(self, logits: Tensor, chunks: Run[ScheduledChunk], chosen: ChosenTokens) -> None:
        """Sample for each chunk; an error of one request must not fail the others."""
        try:
            drawn = self._sampler.draw(logits, [chunk.sequence for chunk in chunks])
            chosen.drawn.append((chunks, drawn))
            return
        except Exception:
            log.exception(
                "sampling %d requests together failed; trying them one by one", len(chunks)
            )
        for row, chunk in enumerate(chunks):
            # The sampler's state of a request may be half changed; it is rebuilt from the output.
            self._sampler.forget(chunk.sequence)
            try:
                drawn = self._sampler.draw(logits[row : row + 1], [chunk.sequence])
                chosen.drawn.append(([chunk], drawn))
            except Exception as error:
                log.exception("sampling for request %s failed", chunk.sequence.request.id)
                message = f"the next token could not be chosen: {type(error).__name__}"
                chosen.failures[chunk] = EngineError(message)
