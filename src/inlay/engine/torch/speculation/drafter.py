"""`Drafter`: the source of a speculator's drafts."""

from collections.abc import Mapping
from typing import Protocol

from inlay.engine.torch.sequence import Sequence


class Drafter(Protocol):
    """Guesses the next tokens of sequences that decode.

    May keep state of a sequence until `forget`.
    """

    def available(self, sequence: Sequence, limit: int) -> int:
        """Return how many drafts there are of `sequence`, at most `limit`.

        To be asked in every step for every sequence that decodes: a drafter may follow it so.
        """

    def draft(
        self, counts: Mapping[Sequence, int], room: int
    ) -> Mapping[Sequence, tuple[int, ...]]:
        """Return drafts of sequences, right after `available` was asked for each.

        Args:
            counts: number of drafts of each, at most as many as are available; the pages of a
                sequence hold its drafts. Fewer may be returned.
            room: positions that may be computed for the drafts beside the drafts themselves.
        """

    def forget(self, sequence: Sequence) -> None:
        """Drop the state of `sequence`, if any."""
