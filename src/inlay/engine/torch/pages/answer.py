"""`PageAnswer`: memory of records for a peer."""

import threading
from collections.abc import Callable
from typing import TypeVar

import torch
from torch import Tensor

from inlay.base.blocks import BlockPool
from inlay.messages.prompt import Buffer

T = TypeVar("T")


class PageAnswer:
    """Memory of an answer to a peer, which is written to until it is closed.

    Args:
        count: records that it may have.
        width: bytes of each.
        into: the peer's own memory, if it has lent some.
        blocks: give memory where it has not.

    Attributes:
        num_bytes: bytes that it takes here.
        is_held: the transport holds it.
    """

    def __init__(self, count: int, width: int, into: memoryview | None, blocks: BlockPool) -> None:
        self._shape = count, width
        self._into = into if into is not None and len(into) == count * width else None
        self._blocks = blocks
        self._records: Tensor | None = None
        if self._into is not None:
            self._records = torch.frombuffer(self._into, dtype=torch.uint8).view(self._shape)
        self._lock = threading.Lock()
        self._closed = False
        self.num_bytes = 0 if self._into is not None else count * width
        self.is_held = False

    def write(self, start: int, stop: int, written: Callable[[Tensor], T]) -> T | None:
        """Call `written` with records `start` to `stop`; None, if closed. In any thread."""
        with self._lock:
            if self._closed:
                return None
            if self._records is None:
                count, width = self._shape
                block = self._blocks.take(count * width)
                self._records = torch.from_numpy(block).view(self._shape)
            return written(self._records[start:stop])

    def data(self, count: int) -> Buffer:
        """Return the first `count` records."""
        if self._into is not None:
            return Buffer(self._into[: count * self._shape[1]])
        if self._records is None:
            return Buffer(b"")
        return Buffer(self._records[:count].view(-1).numpy().data)

    def close(self) -> None:
        """Return once nothing is written to it any more."""
        with self._lock:
            self._closed = True
