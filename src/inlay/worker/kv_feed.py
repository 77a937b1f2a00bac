"""The state of an engine's prefix cache, for routers.

Numbered messages, and all of it when one is asked for.
"""

from collections.abc import Callable, Iterator

from inlay.prompt import Buffer
from inlay.routing import KEY_SIZE, Cleared, KvEvent, KvEvents, KvSnapshot, Removed, Stored


class KvFeed:
    """Follows an engine's cache in blocks of the routing chain. On the event loop."""

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._sequence = 0
        self._tell: Callable[[KvEvents], None] | None = None

    def watch(self, tell: Callable[[KvEvents], None]) -> None:
        """From now on call `tell` with what changes."""
        self._tell = tell

    def take(self, events: tuple[KvEvent, ...]) -> None:
        """The engine's cache has changed."""
        for event in events:
            match event:
                case Stored(keys):
                    self._keys.update(_cut(keys))
                case Removed(keys):
                    self._keys.difference_update(_cut(keys))
                case Cleared():
                    self._keys.clear()
        self._sequence += 1
        if self._tell is not None:
            self._tell(KvEvents(self._sequence, events))

    def snapshot(self) -> KvSnapshot:
        """All that is cached now."""
        return KvSnapshot(self._sequence, Buffer(b"".join(self._keys)))


def _cut(keys: bytes) -> Iterator[bytes]:
    return (keys[start : start + KEY_SIZE] for start in range(0, len(keys), KEY_SIZE))


__all__ = ["KvFeed"]
