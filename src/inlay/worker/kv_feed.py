"""The state of an engine's prefix cache and of the tiers behind it, for routers.

Numbered messages, and all of it when one is asked for.
"""

from collections.abc import Callable, Iterator

from inlay.messages.prompt import Buffer
from inlay.messages.routing import (
    KEY_SIZE,
    Cleared,
    KvEvent,
    KvEvents,
    KvSnapshot,
    KvTier,
    Priced,
    Removed,
    Stored,
)


class _Tier:
    """A tier: what it has, and what it has together with the cache and the tiers before it."""

    __slots__ = ("keys", "price", "reached")

    def __init__(self) -> None:
        self.keys: set[bytes] = set()
        self.reached: set[bytes] = set()
        self.price: float | None = None


class KvFeed:
    """Follows an engine's cache in blocks of the routing chain. On the event loop.

    A prompt's first pages may be in the cache and the rest in a tier. So routers are told of a tier
    together with what is before it.
    """

    def __init__(self) -> None:
        self._keys: set[bytes] = set()
        self._tiers: dict[str, _Tier] = {}
        self._sequence = 0
        self._tell: Callable[[KvEvents], None] | None = None

    def watch(self, tell: Callable[[KvEvents], None]) -> None:
        """From now on call `tell` with what changes."""
        self._tell = tell

    def take(self, events: tuple[KvEvent, ...]) -> None:
        """The engine's cache, or a tier, has changed."""
        told: list[KvEvent] = []
        for event in events:
            if not isinstance(event, Cleared) and event.tier and event.tier not in self._tiers:
                self._tiers[event.tier] = _Tier()
                told += self._reached([*self._keys.union(*(t.keys for t in self._tiers.values()))])
            match event:
                case Stored(keys, tier):
                    cut = list(_cut(keys))
                    (self._tiers[tier].keys if tier else self._keys).update(cut)
                    told += [*([] if tier else [event]), *self._reached(cut)]
                case Removed(keys, tier):
                    cut = list(_cut(keys))
                    (self._tiers[tier].keys if tier else self._keys).difference_update(cut)
                    told += [*([] if tier else [event]), *self._reached(cut)]
                case Cleared():
                    gone = list(self._keys)
                    self._keys.clear()
                    told += [event, *self._reached(gone)]
                case Priced(tier, price):
                    self._tiers[tier].price = price
                    told.append(event)
        if not told:
            return
        self._sequence += 1
        if self._tell is not None:
            self._tell(KvEvents(self._sequence, tuple(told)))

    def _reached(self, keys: list[bytes]) -> Iterator[KvEvent]:
        """Yield what has changed of the tiers, with what is before each."""
        has = [key in self._keys for key in keys]
        for name, tier in self._tiers.items():
            has = [here or key in tier.keys for here, key in zip(has, keys, strict=True)]
            come = [k for k, here in zip(keys, has, strict=True) if here and k not in tier.reached]
            gone = [k for k, here in zip(keys, has, strict=True) if not here and k in tier.reached]
            tier.reached.update(come)
            tier.reached.difference_update(gone)
            if come:
                yield Stored(b"".join(come), name)
            if gone:
                yield Removed(b"".join(gone), name)

    def snapshot(self) -> KvSnapshot:
        """All that is cached now, or kept."""
        tiers = (
            KvTier(name, Buffer(b"".join(tier.reached)), tier.price)
            for name, tier in self._tiers.items()
        )
        return KvSnapshot(self._sequence, Buffer(b"".join(self._keys)), tuple(tiers))


def _cut(keys: bytes) -> Iterator[bytes]:
    return (keys[start : start + KEY_SIZE] for start in range(0, len(keys), KEY_SIZE))
