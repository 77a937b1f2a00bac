"""Preempted sequences whose pages are kept outside of the cache, to go on with them."""

from collections.abc import Callable

from inlay.engine.torch.sequence import Sequence


class Parking:
    """Says which preempted sequences wait for pages. Knows no pages and no tiers.

    A sequence asks once after each preemption, when there is room for it.

    Attributes:
        kept: True if a page (group, digest) is kept somewhere; None where nothing is.
        restore: brings the pages of a sequence back; `ended` is to be called then.
    """

    def __init__(self, page_size: int) -> None:
        self.kept: Callable[[int, bytes], bool] | None = None
        self.restore: Callable[[Sequence], object] = self.ended
        self._size = page_size
        self._preempted: set[Sequence] = set()
        self._waiting: set[Sequence] = set()

    def __len__(self) -> int:
        """Number of sequences that wait for pages."""
        return len(self._waiting)

    def preempted(self, sequence: Sequence) -> None:
        """A sequence has lost its pages."""
        if self.kept is not None:
            self._preempted.add(sequence)

    def waits(self, sequence: Sequence, cached: int) -> bool:
        """True if a sequence, for which there is room, is to wait for its pages.

        Args:
            sequence: waiting.
            cached: page index up to which it finds pages in the cache.
        """
        if sequence in self._preempted:
            self._preempted.discard(sequence)
            stop = sequence.max_cacheable // self._size
            if any(self._is_kept(sequence, index) for index in {cached, stop - 1} if index < stop):
                self._waiting.add(sequence)
                self.restore(sequence)
        return sequence in self._waiting

    def _is_kept(self, sequence: Sequence, index: int) -> bool:
        digest = sequence.page_digest(index, self._size)
        return (
            digest is not None
            and self.kept is not None
            and any(self.kept(group, digest) for group in range(len(sequence.pages)))
        )

    def ended(self, sequence: Sequence) -> None:
        """A sequence waits no more: what came is in the cache, or it has ended."""
        self._preempted.discard(sequence)
        self._waiting.discard(sequence)
