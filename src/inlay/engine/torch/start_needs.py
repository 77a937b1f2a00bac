"""Needs of a sequence before it starts: rows, pages it has lost, pages that another computes."""

from collections.abc import Callable, Iterable

from inlay.engine.torch.needs import PAGES_AGAIN, Need
from inlay.engine.torch.prefix_lookup import may_stop
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


class PagesInProgress:
    """Full pages that running sequences are computing, by digest: the first of each computes it.

    Those that would compute it too wait for it: requests that share a prompt compute it once.
    """

    def __init__(self, page_size: int) -> None:
        self._size = page_size
        self._makers: dict[bytes, Sequence] = {}
        self._waiters: dict[bytes, set[Sequence]] = {}

    def add(self, sequence: Sequence, computed: int) -> None:
        """A sequence has started: it computes its known pages from position `computed` on."""
        for digest in self._digests(sequence, computed):
            if self._makers.setdefault(digest, sequence).paused:
                self._makers[digest] = sequence

    def remove(self, sequence: Sequence, computed: int) -> None:
        """A sequence has stopped; its positions up to `computed` were committed."""
        for digest in self._digests(sequence, computed):
            self.complete(digest, sequence)

    def complete(self, digest: bytes, sequence: Sequence) -> None:
        """A sequence has computed a page, or found it cached."""
        if self._makers.get(digest) is sequence:
            del self._makers[digest]
            self._release(digest)

    def paused(self, sequence: Sequence) -> None:
        """Nobody knows when a sequence goes on: no other waits for what it computes."""
        for digest in [one for one, maker in self._makers.items() if maker is sequence]:
            self._release(digest)

    def wait(self, sequence: Sequence, cached: int) -> bool:
        """Have a sequence wait if one before it computes the page that it would compute next.

        Args:
            sequence: has not started.
            cached: page index up to which it finds pages in the cache.
        """
        stop = (cached + 1) * self._size
        if stop > sequence.max_cacheable or not may_stop(sequence, stop):
            return False
        digest = sequence.page_digest(cached, self._size)
        maker = None if digest is None else self._makers.get(digest)
        if digest is None or maker is None or maker.paused or maker.order >= sequence.order:
            return False
        sequence.needs.add(Need("prefix", digest))
        self._waiters.setdefault(digest, set()).add(sequence)
        return True

    def ended(self, sequence: Sequence) -> None:
        """A sequence waits for no page any more."""
        for need in sequence.needs:
            if need.kind == "prefix":
                self._waiters[need.key].discard(sequence)

    def _release(self, digest: bytes) -> None:
        for sequence in self._waiters.pop(digest, ()):
            sequence.needs.discard(Need("prefix", digest))

    def _digests(self, sequence: Sequence, computed: int) -> Iterable[bytes]:
        for index in range(computed // self._size, sequence.length // self._size):
            digest = sequence.page_digest(index, self._size)
            if digest is not None:
                yield digest
