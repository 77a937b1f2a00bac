"""Messages of a fleet on NATS: heartbeats, cache events, and invitations to workers that dial."""

import msgspec

from inlay.messages.card import PROTOCOL, Address, Stats
from inlay.messages.routing import KvEvents


class CacheEvents(msgspec.Struct, frozen=True, array_like=True):
    """Changes of the prefix cache of one incarnation of a worker."""

    incarnation: int
    events: KvEvents


class DialRequest(msgspec.Struct, frozen=True, array_like=True):
    """A frontend's address, and the token to say there, for a worker that dials."""

    address: Address
    token: bytes


class Beat(msgspec.Struct, frozen=True, array_like=True):
    """A worker's heartbeat.

    Attributes:
        protocol: version of the messages it speaks.
        incarnation: number of engines it has run: a new one knows nothing of the requests and the
            cache of the last.
        revision: of its card in the key-value bucket; 0 while it has none, as it loads its model
            for the first time.
        state: "ready"; "draining": finishes what it has and takes nothing more; "away": has no
            engine now; "left": it ends.
        stats: of its engine, at the last reading; totals restart with the incarnation.
        stats_age: seconds since that reading; it grows while an engine hangs.
    """

    protocol: int
    incarnation: int
    revision: int
    state: str = "ready"
    stats: Stats = Stats()
    stats_age: float = 0.0


OLDEST = PROTOCOL
"""The oldest version of the protocol that is understood."""
