"""Needs of a sequence before it starts: rows, and pages it has lost."""

from collections.abc import Callable

from inlay.engine.torch.needs import PAGES_AGAIN, Need
from inlay.engine.torch.sequence import Sequence


class StartNeeds:
    """Finds what comes from outside the scheduler. Knows no encoders and no tiers.

    Attributes:
        asked: needs found since it was emptied, with their sequences, which wait for them.
        is_kept: True if a page (group, digest) is kept outside the cache; None where none is.
    """

    def __init__(self, page_size: int) -> None:
        self.asked: list[tuple[Sequence, Need]] = []
        self.is_kept: Callable[[int, bytes], bool] | None = None
        self._size = page_size

    def ask_rows(self, sequence: Sequence, cached: int) -> bool:
        """True if rows of items after page index `cached` are missing; ask for them."""
        missing = [] if sequence.media is None else sequence.media.missing(cached * self._size)
        for run in missing:
            self._ask(sequence, Need("rows", run.digest, run))
        return bool(missing)

    def ask_pages(self, sequence: Sequence, cached: int) -> bool:
        """True if pages of a preempted sequence, for which there is room, are kept; ask for them.

        `cached` is the page index up to which it finds pages in the cache.
        """
        sequence.may_restore = False
        stop = sequence.max_cacheable // self._size
        for index in {cached, stop - 1}:
            digest = sequence.page_digest(index, self._size) if index < stop else None
            if digest is None or self.is_kept is None:
                continue
            if any(self.is_kept(group, digest) for group in range(len(sequence.pages))):
                self._ask(sequence, PAGES_AGAIN)
                return True
        return False

    def _ask(self, sequence: Sequence, need: Need) -> None:
        if need not in sequence.needs:
            sequence.needs.add(need)
            self.asked.append((sequence, need))
