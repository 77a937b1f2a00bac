"""Payloads of one stage that another is fed with."""

from typing import TypeAlias

import msgspec

from inlay.messages.edges import PayloadLease, Window

NEWEST = Window(newest=True)
"""Window of a stream of which the newest payload counts."""

Ports: TypeAlias = tuple[tuple[str, str], ...]
"""Pairs of a port of one stage and the port of another that it feeds."""


class Feed(msgspec.Struct, frozen=True, array_like=True):
    """Ports of a stage that are fed by what a request at another worker makes.

    Attributes:
        lease: of that request.
        ports: pairs of a port there and the stage's own that it feeds.
        window: of payloads that have come and are not taken; None: all of them are made, and come
            before the stage begins.
    """

    lease: PayloadLease
    ports: Ports
    window: Window | None = None


def renamed(port: str, ports: Ports) -> str | None:
    """Return a stage's own name for what another gives on `port`; None if that feeds nothing."""
    for other, own in ports:
        if port == other or port.startswith(f"{other}."):
            return own + port[len(other) :]
    return None
