"""Messages of any size between participants, with raw buffers beside a small header.

A message that fits is one NATS message: a fixed head, the sender's id, the sizes of the buffers,
the header, then the buffers, each aligned to `ALIGNMENT`. A larger one is a transfer. Messages that
fit arrive in the order they were sent; nothing is certain to arrive, as nothing is in a network:
what must not be lost is asked for again by those who need it.
"""

import logging
import struct
from collections.abc import Callable
from typing import Any, Generic, TypeVar

import msgspec
from nats.aio.msg import Msg

from inlay.prompt import Buffer
from inlay.transport import frames
from inlay.transport.nats.connection import Connection
from inlay.transport.nats.embeds_cache import EmbedsCache
from inlay.transport.nats.notices import Notice
from inlay.transport.nats.outbound import Outbound
from inlay.transport.nats.subjects import Subjects, last_token
from inlay.transport.nats.transfers import NAMED_BYTES, Room, Transfers

log = logging.getLogger(__name__)

WHOLE_BYTES = 256 * 1024
"""A message of so many bytes is sent at once."""
ALIGNMENT = 16

_MESSAGE, _NOTICE = 0, 1
_head = struct.Struct("<BBHI")

T = TypeVar("T")

_notices = msgspec.msgpack.Decoder[Notice](Notice)
_encode_notice = msgspec.msgpack.Encoder().encode


def pack(
    kind: int, sender: bytes, header: bytes, buffers: "list[Buffer] | tuple[()]" = ()
) -> bytes:
    """A message as one run of bytes."""
    head = _head.pack(kind, len(sender), len(buffers), len(header))
    if not buffers:
        return head + sender + header
    table = struct.pack(f"<{len(buffers)}Q", *map(len, buffers))
    parts = [head, sender, table, header]
    size = sum(map(len, parts))
    for buffer in buffers:
        pad = -size % ALIGNMENT
        parts += [bytes(pad), buffer.view]  # type: ignore[list-item]  # joined, so a view will do
        size += pad + len(buffer)
    return b"".join(parts)


def unpack(data: bytes) -> tuple[int, str, memoryview, list[Buffer]]:
    """(kind, sender, header, buffers) of a message, in place.

    Raises:
        msgspec.DecodeError: it is none.
    """
    view = memoryview(data)
    try:
        kind, sender_size, count, header_size = _head.unpack_from(view)
        at = _head.size
        sender = str(view[at : at + sender_size], "ascii")
        at += sender_size
        sizes = struct.unpack_from(f"<{count}Q", view, at) if count else ()
        at += 8 * count
        header = view[at : at + header_size]
        if len(header) != header_size:
            raise ValueError("the header is cut")
        at += header_size
        buffers = []
        for size in sizes:
            at += -at % ALIGNMENT
            if at + size > len(view):
                raise ValueError("a buffer is cut")
            buffers.append(Buffer(view[at : at + size]))
            at += size
    except (struct.error, ValueError) as error:
        raise msgspec.DecodeError(f"no message: {error}") from error
    return kind, sender, header, buffers


class Mailbox(Generic[T]):
    """One participant's end of all its conversations.

    Attributes:
        id: of the participant.
        transfers: the messages under way that are too large to be sent at once.
    """

    def __init__(
        self,
        control: Connection,
        bulk: Connection,
        subjects: Subjects,
        id_: str,
        hears: Any,
        *,
        take: Callable[[str, T], None],
        unheard: Callable[[str], None],
        room: Room | None = None,
        kept: EmbedsCache | None = None,
    ) -> None:
        """Nothing is received before `open`.

        Args:
            control: carries messages and notices.
            bulk: carries chunks.
            subjects: of the namespace.
            id_: of the participant.
            hears: the type, or union of types, of the messages that will come.
            take: takes (sender, message).
            unheard: told the participant that a probing message found no listener for.
            room: as of `Transfers`.
            kept: as of `Transfers`.
        """
        self.id = id_
        self._sender = id_.encode("ascii")
        self._control = control
        self._subjects = subjects
        self._decoder = frames.Decoder[T](hears)
        self._take = take
        self._unheard = unheard
        self.transfers = Transfers(
            bulk, subjects, id_, tell=self._notify, deliver=self._decode, room=room, kept=kept
        )

    async def open(self) -> None:
        """Begin to receive."""
        await self._control.subscribe(self._subjects.messages(self.id), self._received)
        await self._control.subscribe(self._subjects.unheard(self.id), self._nobody)
        await self.transfers.open()

    @property
    def limit(self) -> int:
        """Bytes a message may have that is sent at once."""
        return min(WHOLE_BYTES, self._control.max_payload)

    def send(self, to: str, message: object, *, probe: bool = False) -> Outbound | None:
        """Send a message.

        Args:
            to: a participant.
            message: what it hears.
            probe: have `unheard` called when nobody listens; of messages that are sent at once.

        Returns:
            The transfer, where it takes one; None where the message has been sent.
        """
        return self.send_encoded(to, *frames.encode(message), probe=probe)

    def send_encoded(
        self, to: str, header: bytes, buffers: list[Buffer], *, probe: bool = False
    ) -> Outbound | None:
        """As `send`, of what `frames.encode` made of the message."""
        size = sum(map(len, buffers)) + len(header) + len(self._sender) + 64 + 24 * len(buffers)
        if size > self.limit or any(
            buffer.name and len(buffer) >= NAMED_BYTES for buffer in buffers
        ):
            return self.transfers.offer(to, header, buffers)
        reply = self._subjects.unheard(self.id, to) if probe else ""
        self._control.publish(
            self._subjects.messages(to), pack(_MESSAGE, self._sender, header, buffers), reply
        )
        return None

    def _notify(self, to: str, notice: Notice) -> None:
        payload = pack(_NOTICE, self._sender, _encode_notice(notice))
        self._control.publish(self._subjects.messages(to), payload)

    def _received(self, message: Msg) -> None:
        try:
            kind, sender, header, buffers = unpack(message.data)
            if kind == _NOTICE:
                self.transfers.hear(sender, _notices.decode(header))
                return
        except msgspec.MsgspecError as error:
            log.warning("what came is no message: %s", error)
            return
        self._decode(sender, header, buffers)

    def _decode(self, sender: str, header: memoryview, buffers: list[Buffer]) -> None:
        try:
            message = self._decoder.decode(header, buffers)
        except (msgspec.MsgspecError, ValueError) as error:
            # Of a newer version perhaps: whoever needs an answer notices that none comes.
            log.warning("a message from %s is not understood: %s", sender, error)
            return
        self._take(sender, message)

    def _nobody(self, message: Msg) -> None:
        self._unheard(last_token(message.subject))
