"""A worker's cache of embeddings that it has received, by name, so that they are sent once."""

import time
from collections import OrderedDict
from collections.abc import Callable
from weakref import WeakValueDictionary

import msgspec

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
        self._lasting: OrderedDict[str, Buffer] = OrderedDict()
        self._used_at: dict[str, float] = {}
        self._parts: dict[str, set[str]] = {}
        self._gone: OrderedDict[str, float] = OrderedDict()
        self._num_bytes = self._hits = self._misses = self._evictions = 0

    def find(self, name: str, num_bytes: int) -> Buffer | None:
        """The buffer of that name and size, if it is here. Not a use."""
        found = self._lasting.get(name)
        if found is None:
            found = self._in_use.get(name)
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
        if len(buffer) <= self.max_bytes and _prompt(name) not in self._gone:
            self._keep(name, buffer)

    def _keep(self, name: str, buffer: Buffer) -> None:
        self._drop(name)
        while self._num_bytes + len(buffer) > self.max_bytes:
            self._drop(next(iter(self._lasting)))
            self._evictions += 1
        self._lasting[name] = buffer
        self._used_at[name] = self._clock()
        self._num_bytes += len(buffer)
        self._parts.setdefault(_prompt(name), set()).add(name)

    def _drop(self, name: str) -> None:
        buffer = self._lasting.pop(name, None)
        if buffer is None:
            return
        del self._used_at[name]
        self._num_bytes -= len(buffer)
        prompt = _prompt(name)
        parts = self._parts[prompt]
        parts.remove(name)
        if not parts:
            del self._parts[prompt]

    def forget(self, prompt: str) -> None:
        """Drop a prompt that was removed; what of it is still on its way is used and not kept."""
        for name in list(self._parts.get(prompt, ())):
            self._drop(name)
        self._gone[prompt] = self._clock()
        self._gone.move_to_end(prompt)
        if len(self._gone) > _MAX_GONE:
            self._gone.popitem(last=False)

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
        while self._lasting:
            oldest = next(iter(self._lasting))
            if now - self._used_at[oldest] <= IDLE_SECONDS:
                break
            self._drop(oldest)
        while self._gone and now - next(iter(self._gone.values())) > GONE_SECONDS:
            self._gone.popitem(last=False)

    @property
    def stats(self) -> EmbedsCacheStats:
        """The counters now."""
        return EmbedsCacheStats(self._num_bytes, self._hits, self._misses, self._evictions)


def _prompt(name: str) -> str:
    return name.partition("/")[0]
