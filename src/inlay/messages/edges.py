"""Payloads that a worker keeps for others, and how those ask for them.

A payload is freed once its reader asks for those behind it. A whole edge is a stream without bounds
that is asked for once, when all of it is made. Of a stream of which the newest counts, one that is
not read is dropped for the next, so that nobody waits; the last is kept for whoever reads again.
"""

from typing import Literal

import msgspec

from inlay.base.address import Address


class Window(msgspec.Struct, frozen=True, array_like=True):
    """Bounds of payloads that are there and not used yet.

    Attributes:
        items: number of them; None for no bound.
        num_bytes: of all together; None for no bound.
        newest: only the newest payload counts; the last of the stream ends it.
    """

    items: int | None = None
    num_bytes: int | None = None
    newest: bool = False

    def full(self, items: int, num_bytes: int) -> bool:
        """Return True if that much leaves no room; there is always room for the first."""
        return items > 0 and (
            (self.items is not None and items >= self.items)
            or (self.num_bytes is not None and num_bytes >= self.num_bytes)
        )

    def left(self, items: int, num_bytes: int) -> "Window":
        """Return the room that is left beside that much; at least for one item."""
        return Window(
            None if self.items is None else max(1, self.items - items),
            None if self.num_bytes is None else max(1, self.num_bytes - num_bytes),
        )


class PayloadLease(msgspec.Struct, frozen=True, array_like=True):
    """The place of what a request makes, which its worker keeps until the request is cancelled.

    Attributes:
        address: of the worker.
        key: of the request there, random: who knows it may have its payloads.
    """

    address: Address
    key: bytes


class Fetch(msgspec.Struct, frozen=True, kw_only=True, tag="fetch"):
    """Parameters of a request for payloads that the worker keeps.

    The answer has what is made from `start` on, once there is some, and frees what is before it;
    one without payloads says that nothing follows.

    Attributes:
        key: of the request that makes them.
        start: number of the first that is wanted, 0 where the newest counts; `NONE_WANTED`: what
            is made is dropped from here on, and the request goes on.
        window: how much is wanted at most; a single payload may be larger.
    """

    key: bytes
    start: int = 0
    window: Window = Window()


NONE_WANTED = -1
"""Number that workers of earlier versions have no payload of, so that they change nothing."""


HeldReason = Literal["stop", "length"]
"""Reason for the end of a request whose payloads are kept."""
