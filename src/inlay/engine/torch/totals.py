"""Totals of a core since its start."""

from collections.abc import Iterable
from dataclasses import dataclass

from inlay.engine.torch.plan import ScheduledChunk
from inlay.engine.torch.sequence import Sequence
from inlay.prompt import Rows


@dataclass(slots=True)
class Totals:
    """Totals under the names of `inlay.card.Stats`."""

    prompt_tokens: int = 0
    cached_tokens: int = 0
    rows_served: int = 0
    generated_tokens: int = 0
    steps: int = 0
    progress: int = 0

    def add_step(self, chunks: Iterable[ScheduledChunk]) -> None:
        """Count a step."""
        self.steps += 1
        self.progress += sum(chunk.count for chunk in chunks)

    def add_prompt(self, sequence: Sequence) -> None:
        """Count the prompt of a sequence."""
        self.prompt_tokens += len(sequence.prompt)
        self.cached_tokens += sequence.cached_tokens
        self.rows_served += sum(
            len(segment) for segment in sequence.prompt.segments if isinstance(segment, Rows)
        )
