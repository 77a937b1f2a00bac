"""Names of buffers on a connection."""

import secrets
from weakref import ref

from inlay.messages.prompt import Buffer

NAMED_BYTES = 64 * 1024
"""Bytes of a buffer from which on it is sent once, however many messages hold it."""
OWN_NAME = "~"
"""Begins the names that a connection gives; what they name is not kept beyond its use."""


class BufferNames:
    """Names of large buffers that have none, so that what several messages share is sent once."""

    def __init__(self) -> None:
        self._prefix = f"{OWN_NAME}{secrets.token_hex(8)}."
        self._next = 0
        self._known: dict[int, tuple[ref[Buffer], str]] = {}

    def is_known(self, buffer: Buffer) -> bool:
        """Return True if the other end may have the buffer: by its own name, or sent before."""
        return bool(buffer.name) or id(buffer) in self._known

    def of(self, buffer: Buffer) -> str:
        """Return the name of a buffer; of a small one, that no name is worth it."""
        if buffer.name or len(buffer) < NAMED_BYTES:
            return buffer.name
        key = id(buffer)
        known = self._known.get(key)
        if known is None:
            self._next += 1
            dead = ref(buffer, lambda _: self._known.pop(key, None))
            known = self._known[key] = dead, f"{self._prefix}{self._next}"
        return known[1]
