"""Events of the prefix cache: as vLLM's KV events, and as blocks of the routing chain."""

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from blake3 import blake3

from inlay.engine.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, Event
from inlay.engine.kv_events_config import KvEventsConfig
from inlay.engine.settings import EngineSettings
from inlay.engine.torch.sequence import Sequence as Computed
from inlay.engine.torch.windows import Chunk, Window
from inlay.messages.digest import BLOCK_DIGEST_SIZE, BLOCK_SIZE, Secret
from inlay.messages.prompt import Tokens
from inlay.messages.routing import Cleared, KvEvent, Removed, Stored, keys_of


class Publisher(Protocol):
    """Publishes vLLM's events."""

    def publish(self, ts: float, events: Sequence[Event]) -> None:
        """Publish the events of one step, with the seconds since the epoch. Does not block."""

    def close(self) -> None:
        """Stop publishing."""


class WatchedTiers(Protocol):
    """Tiers behind the cache."""

    def watch(self, group: int, tell: Callable[[tuple[KvEvent, ...]], None]) -> None:
        """Call `tell` with what they have of a page group, and what changes, in order."""


Tell = Callable[[tuple[KvEvent, ...]], None]


@dataclass(slots=True)
class _BlocksStored:
    """Pages of one sequence, in order, that were added to a group's cache."""

    group: int
    parent: bytes | None
    adapter: str | None
    digests: list[bytes] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    keys: bytes = b""


@dataclass(slots=True)
class _BlocksRemoved:
    """Pages that were removed from a group's cache."""

    group: int
    digests: list[bytes] = field(default_factory=list)
    keys: bytes = b""


class CacheEventQueue:
    """Collects changes of the prefix cache and reports them on `flush`.

    Used by one thread at a time.

    With several page groups, a block of the routing chain counts as cached while its page is in the
    first group that keeps all positions, or else in the first group.

    Attributes:
        changes: those since the last `flush`, in order.
        tell: receives changes as blocks of the routing chain; None if unused.
        publisher: publisher of vLLM's events; None if unused.
        tiers: that keep what the cache evicts; None without.
    """

    def __init__(self, settings: EngineSettings, secret: Secret) -> None:
        """Create it without receivers.

        Published blocks are named by digests of their digests, which disclose nothing.
        """
        self.tell: Tell | None = None
        self.publisher: Publisher | None = None
        self.tiers: WatchedTiers | None = None
        self._config = settings.events.kv_events_config
        self._rank, self._ranks = (
            settings.devices.data_parallel_rank or 0,
            settings.devices.data_parallel_size,
        )
        self._token_ids = settings.events.kv_events_token_ids
        self._page_size = settings.cache.block_size
        self._key = secret.events
        self._windows: tuple[Window, ...] = (None,)
        self._routed = 0
        self._keys: dict[bytes, bytes] = {}
        self.changes: list[_BlocksStored | _BlocksRemoved] = []

    def open(self) -> None:
        """Start publishing if the settings enable it.

        Raises `InvalidRequestError` for invalid settings.
        """
        config = KvEventsConfig.parse(self._config, ranks=self._ranks)
        if config.publishes:
            # Imported late: ZeroMQ is needed for publishing only.
            from inlay.engine.kv_publisher import KvPublisher

            self.publisher = KvPublisher(config, self._rank)

    def watch(self, tell: Tell) -> None:
        """Report changes to `tell` from now on, and those of the tiers behind the cache."""
        self.tell = tell
        if self.tiers is not None:
            self.tiers.watch(self._routed, tell)

    @property
    def _heard(self) -> bool:
        return self.tell is not None or self.publisher is not None

    def begin(self, windows: Sequence[Window], page_size: int) -> None:
        """Start with an empty cache whose page groups have these `windows`."""
        self._page_size = page_size
        self._windows = tuple(windows)
        self._routed = self._windows.index(None) if None in self._windows else 0

    def stored(self, sequence: Computed, index: int, group: int) -> None:
        """Record that page `index` of `sequence` now has a digest in `group`."""
        if not self._heard:
            return
        digest = sequence.page_digest(index, self._page_size)
        if digest is None:
            raise ValueError("a page without a digest cannot be cached")
        parent = sequence.page_digest(index - 1, self._page_size) if index else None
        last = self.changes[-1] if self.changes else None
        if not (
            isinstance(last, _BlocksStored)
            and last.group == group
            and parent
            and last.digests[-1] == parent
        ):
            last = _BlocksStored(group, parent, sequence.request.adapter)
            self.changes.append(last)
        last.digests.append(digest)
        start = index * self._page_size
        if self.publisher is not None and self._token_ids:
            for _, segment in sequence.segments(start, start + self._page_size):
                last.token_ids += segment.ids if isinstance(segment, Tokens) else [0] * len(segment)
        if self.tell is not None and group == self._routed:
            blocks = self._page_size // BLOCK_SIZE
            keys = self._keys[digest] = keys_of(
                sequence.blocks(index * blocks, (index + 1) * blocks)
            )
            last.keys += keys

    def removed(self, digest: bytes, group: int) -> None:
        """Record that no page of `group` has `digest` any more."""
        if not self._heard:
            return
        last = self.changes[-1] if self.changes else None
        if not (isinstance(last, _BlocksRemoved) and last.group == group):
            last = _BlocksRemoved(group)
            self.changes.append(last)
        last.digests.append(digest)
        if group == self._routed:
            last.keys += self._keys.pop(digest, b"")

    def flush(self) -> None:
        """Report the changes since the last call."""
        changes, self.changes = self.changes, []
        if not changes:
            return
        if self.tell is not None:
            told = [change for change in changes if change.keys]
            if told:
                self.tell(
                    tuple(
                        (Stored if isinstance(of, _BlocksStored) else Removed)(of.keys)
                        for of in told
                    )
                )
        if self.publisher is not None:
            self.publisher.publish(time.time(), [self._published(change) for change in changes])

    def end(self) -> None:
        """Report that the whole cache is gone."""
        self.flush()
        self._keys.clear()
        if self.tell is not None:
            self.tell((Cleared(),))
        if self.publisher is not None:
            self.publisher.publish(time.time(), [AllBlocksCleared()])

    def close(self) -> None:
        """Stop publishing."""
        if self.publisher is not None:
            self.publisher.close()

    def _published(self, change: _BlocksStored | _BlocksRemoved) -> Event:
        names = [self._name(digest) for digest in change.digests]
        if isinstance(change, _BlocksRemoved):
            return BlockRemoved(block_hashes=[*names], medium="GPU", group_idx=change.group)
        window = self._windows[change.group]
        return BlockStored(
            block_hashes=[*names],
            parent_block_hash=None if change.parent is None else self._name(change.parent),
            token_ids=change.token_ids,
            block_size=self._page_size,
            lora_id=None,
            medium="GPU",
            lora_name=change.adapter,
            group_idx=change.group,
            kv_cache_spec_kind=_kind(window),
            kv_cache_spec_sliding_window=window if isinstance(window, int) else None,
        )

    def _name(self, digest: bytes) -> bytes:
        return blake3(digest, key=self._key).digest(BLOCK_DIGEST_SIZE)


def _kind(window: Window) -> str:
    """Return vLLM's name of a group's kind."""
    if isinstance(window, Chunk):
        return "chunked_local_attention"
    return "full_attention" if window is None else "sliding_window"
