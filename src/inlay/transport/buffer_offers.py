"""Bodies of frames about large messages: what is offered, and what is granted."""

import msgspec


class BufferOffer(msgspec.Struct, frozen=True, array_like=True):
    """A large message that is to be sent.

    Attributes:
        sizes: in bytes of its parts, the header first.
        names: of the parts; empty for those without one.
        accepts_credit: the sender knows what credit is; older versions do not.
    """

    sizes: tuple[int, ...]
    names: tuple[str, ...]
    accepts_credit: bool = False


class BufferLocations(msgspec.Struct, frozen=True, array_like=True):
    """A grant by an end whose memory the other can write to.

    Attributes:
        present: numbers of the parts that are there already.
        offsets: in that memory, by number of a part: it is written there, and not sent.
    """

    present: tuple[int, ...]
    offsets: dict[int, int]


encode = msgspec.msgpack.Encoder().encode
decode_offer = msgspec.msgpack.Decoder(BufferOffer).decode
decode_present = msgspec.msgpack.Decoder(tuple[int, ...]).decode
decode_places = msgspec.msgpack.Decoder(BufferLocations).decode
