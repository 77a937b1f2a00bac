"""Records of responses and conversations; each is replaced as a whole."""

from base64 import b32encode
from collections.abc import Iterable
from secrets import token_bytes
from typing import Final, Literal, TypeAlias

import msgspec

from inlay.store.kept.contents import Piece
from inlay.store.kept.lease import Held, Lease

JOBS: Final = "jobs"
"""First part of the keys that name background responses which have not ended."""

Status: TypeAlias = Literal[
    "queued", "in_progress", "completed", "incomplete", "failed", "cancelled"
]
ENDED: Final[frozenset[Status]] = frozenset({"completed", "incomplete", "failed", "cancelled"})


def new_id(kind: Literal["resp_", "conv_"]) -> str:
    """Return an id that cannot be guessed: 128 bits in base32."""
    return kind + b32encode(token_bytes(16)).decode().lower().rstrip("=")


class ResponseRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A response.

    Attributes:
        id: of the response.
        created_at: Unix time.
        expires_at: Unix time from which it is gone.
        status: as clients see it.
        background: no client waits for it.
        previous: id of the response that it goes on with.
        conversation: id of the conversation that it belongs to.
        session: first id of its chain, by which workers are found that know the prefix.
        lease: who runs it.
        renewed: counts up with each renewal of the lease.
        faults: times that its frontend could not go on with it.
        request: the body of a background response, until it has ended.
        input: its own items, a JSON list.
        output: the response as JSON, as far as it is known.
        events: JSON lines.
    """

    id: str
    created_at: int
    expires_at: int
    status: Status
    background: bool = False
    previous: str | None = None
    conversation: str | None = None
    session: str = ""
    lease: Lease = Lease()
    renewed: int = 0
    faults: int = 0
    request: tuple[Piece, ...] = ()
    input: tuple[Piece, ...] = ()
    output: tuple[Piece, ...] = ()
    events: tuple[Piece, ...] = ()

    @property
    def ended(self) -> bool:
        return self.status in ENDED

    @property
    def pieces(self) -> Iterable[Piece]:
        """Yield all contents that it names."""
        yield from (*self.request, *self.input, *self.output, *self.events)


class ConversationRecord(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """A conversation.

    Attributes:
        id: of the conversation.
        created_at: Unix time.
        expires_at: Unix time from which it is gone.
        metadata: the client's own.
        items: a JSON list.
        locked_by: id of the response that is being made; "" for none.
        locked_until: Unix time at which a response that was not ended gives it up.
    """

    id: str
    created_at: int
    expires_at: int
    metadata: dict[str, str] = {}
    items: tuple[Piece, ...] = ()
    locked_by: str = ""
    locked_until: float = 0.0

    @property
    def pieces(self) -> Iterable[Piece]:
        """Yield all contents that it names."""
        yield from self.items


Record: TypeAlias = ResponseRecord | ConversationRecord
HeldResponse: TypeAlias = Held[ResponseRecord]

encode = msgspec.msgpack.Encoder().encode
_responses = msgspec.msgpack.Decoder(ResponseRecord)
_conversations = msgspec.msgpack.Decoder(ConversationRecord)


def decode(key: str, record: bytes) -> Record | None:
    """Return the record under a key; None under a key of `JOBS`. Raises `msgspec.MsgspecError`."""
    owner, _, id_ = key.partition(".")
    if owner == JOBS:
        return None
    return (_conversations if id_.startswith("conv_") else _responses).decode(record)


def decode_response(key: str, record: bytes) -> ResponseRecord | None:
    """Return the record under a key if it is a response. Raises `msgspec.MsgspecError`."""
    found = decode(key, record)
    return found if isinstance(found, ResponseRecord) else None
