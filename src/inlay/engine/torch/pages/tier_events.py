"""Changes of a tier, for routers: routing keys of pages that it gains and loses."""

import threading
from collections.abc import Callable, Iterable

from inlay.messages.routing import KvEvent, Removed, Stored, keys_of

Tell = Callable[[tuple[KvEvent, ...]], None]


class TierEvents:
    """Collects changes of a tier and reports them on `flush`. In any thread.

    Args:
        tier: name of it.
        group: page group whose pages are reported, as of `CacheEventQueue`.
        tell: receives the changes.
    """

    def __init__(self, tier: str, group: int, tell: Tell) -> None:
        self._tier = tier
        self._group = group
        self._tell = tell
        self._lock = threading.Lock()
        self._changes: dict[bytes, bool] = {}

    def begin(self, names: Iterable[tuple[int, bytes]]) -> None:
        """Report all that the tier has, by group and digest, if only that it is there."""
        digests = [digest for group, digest in names if group == self._group]
        self._tell((Stored(keys_of(digests), self._tier),))

    def stored(self, group: int, digest: bytes) -> None:
        """Record that there is a page now."""
        self._record(group, digest, there=True)

    def removed(self, group: int, digest: bytes) -> None:
        """Record that there is none of that name any more."""
        self._record(group, digest, there=False)

    def _record(self, group: int, digest: bytes, *, there: bool) -> None:
        if group == self._group:
            with self._lock:
                self._changes[digest] = there

    def flush(self) -> None:
        """Report the changes since the last call."""
        with self._lock:
            changes, self._changes = self._changes, {}
            come = [digest for digest, there in changes.items() if there]
            gone = [digest for digest, there in changes.items() if not there]
            events: list[KvEvent] = []
            if come:
                events.append(Stored(keys_of(come), self._tier))
            if gone:
                events.append(Removed(keys_of(gone), self._tier))
            if events:
                # Within the lock: what was recorded later must be told later.
                self._tell(tuple(events))
