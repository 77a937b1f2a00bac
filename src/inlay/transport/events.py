"""Events of a connection: what its frames bring (`inlay.transport.wire`)."""

from collections.abc import Sequence
from typing import NamedTuple, TypeAlias

from inlay.messages.prompt import Buffer
from inlay.transport.buffer_offers import BufferOffer


class WireMessage(NamedTuple):
    """A whole message: its header, its buffers, and the number of the offer of a large one."""

    header: bytes | memoryview
    buffers: Sequence[Buffer]
    number: int | None = None


class Offered(NamedTuple):
    """A large message that the peer wants to send, or sends `unasked`."""

    number: int
    offer: BufferOffer
    unasked: bool


class Withdrawn(NamedTuple):
    """A large message that the peer no longer sends."""

    number: int


class Credited(NamedTuple):
    """So many bytes that may be sent unasked, besides those granted before; 0: no more."""

    num_bytes: int


class Returned(NamedTuple):
    """The peer sends nothing more unasked."""


Event: TypeAlias = WireMessage | Offered | Withdrawn | Credited | Returned
