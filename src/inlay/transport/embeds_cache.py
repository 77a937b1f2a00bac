"""A worker's cache of embeddings that it has received, by name, so that they are sent once."""

import time
from collections.abc import Callable
from weakref import WeakValueDictionary

import msgspec

from inlay.base.lru import LruBytes
from inlay.messages.prompt import Buffer

KEPT_BYTES = 256 * 1024 * 1024
"""Of what lasts, unless said otherwise."""
IDLE_SECONDS = 3600.0
"""Seconds after which an unused buffer is dropped.

Who was to tell that its prompt is gone may have died before it did.
"""
GONE_SECONDS = 600.0
"""Seconds for which a prompt that was removed is not cached again.

What was sent before its removal may come after it.
"""
_MAX_GONE = 65536


class EmbedsCacheStats(msgspec.Struct, frozen=True):
    """The same as of `inlay.messages.card.Stats`."""

    kept_bytes: int = 0
    kept_hits: int = 0
    kept_misses: int = 0
    kept_evictions: int = 0


class EmbedsCache:
    """Buffers by name. The content of a name never changes, so what is kept stays right.

    A name is `PROMPT/PART`; or any other, of a buffer that is not to last. Whatever somebody uses
    at the moment is found too: it costs nothing more. Of what is to last the least recently used
    goes first. Nobody waits for room here.

    Args:
        max_bytes: of what lasts; 0 keeps nothing beyond its use.
        clock: seconds that only grow.
    """

    def __init__(self, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        self.max_bytes = max_bytes
        self._clock = clock
        self._in_use: WeakValueDictionary[str, Buffer] = WeakValueDictionary()
        self._lasting: LruBytes[str, tuple[Buffer, float]] = LruBytes(
            max_bytes, lambda _, kept: len(kept[0]), lambda name, _: self._part(name)
        )
        self._parts: dict[str, set[str]] = {}
        self._gone: LruBytes[str, float] = LruBytes(_MAX_GONE)
        self._hits = self._misses = 0

    def find(self, name: str, num_bytes: int) -> Buffer | None:
        """The buffer of that name and size, if it is here. Not a use."""
        kept = self._lasting.peek(name)
        found = self._in_use.get(name) if kept is None else kept[0]
        if found is None or len(found) != num_bytes or _prompt(name) in self._gone:
            return None
        return found

    def use(self, name: str, buffer: Buffer, *, lasting: bool, new: bool) -> None:
        """Count a use of `buffer` under `name`, which has just come if it is `new`.

        Keep it if it is to last.
        """
        if new:
            self._in_use[name] = buffer
        if not lasting:
            return
        if new:
            self._misses += 1
        else:
            self._hits += 1
        prompt = _prompt(name)
        if prompt not in self._gone and self._lasting.put(name, (buffer, self._clock())):
            self._parts.setdefault(prompt, set()).add(name)

    def _drop(self, name: str) -> None:
        self._lasting.pop(name)
        self._part(name)

    def _part(self, name: str) -> None:
        prompt = _prompt(name)
        parts = self._parts[prompt]
        parts.remove(name)
        if not parts:
            del self._parts[prompt]

    def forget(self, prompt: str) -> None:
        """Drop a prompt that was removed; what of it is still on its way is used and not kept."""
        for name in list(self._parts.get(prompt, ())):
            self._drop(name)
        self._gone.put(prompt, self._clock())

    def clear(self) -> None:
        """Drop everything, and find nothing of it any more.

        What was removed may not have been told, or the memory it lies in is to go.
        """
        for name in list(self._lasting):
            self._drop(name)
        self._in_use.clear()

    def tick(self) -> None:
        """Drop what nobody asked for during `IDLE_SECONDS`; to be called from time to time."""
        now = self._clock()
        while (lasting := self._lasting.oldest()) and now - lasting[1][1] > IDLE_SECONDS:
            self._drop(lasting[0])
        while (gone := self._gone.oldest()) and now - gone[1] > GONE_SECONDS:
            self._gone.pop(gone[0])

    @property
    def stats(self) -> EmbedsCacheStats:
        """The counters now."""
        return EmbedsCacheStats(
            self._lasting.used, self._hits, self._misses, self._lasting.evictions
        )


def _prompt(name: str) -> str:
    return name.partition("/")[0]
