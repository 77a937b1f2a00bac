"""Messages as bytes: a small msgpack header, and beside it the raw buffers it names.

`encode` never copies a `Buffer`; a `Decoder` gives back buffers that view what it was given.
"""

import struct
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import msgspec

from inlay.messages.prompt import Buffer

_BUFFER_CODE = 1
_counts = struct.Struct("<II")

T = TypeVar("T")


def encode(message: object) -> tuple[bytes, list[Buffer]]:
    """The header of `message` and the buffers it refers to by index.

    A buffer that occurs twice (the same object) is carried once.
    """
    buffers: list[Buffer] = []
    indices: dict[int, int] = {}

    def lift(value: object) -> object:
        if not isinstance(value, Buffer):
            raise NotImplementedError
        index = indices.setdefault(id(value), len(buffers))
        if index == len(buffers):
            buffers.append(value)
        return msgspec.msgpack.Ext(_BUFFER_CODE, index.to_bytes(4, "little"))

    return msgspec.msgpack.Encoder(enc_hook=lift).encode(message), buffers


def joined(header: bytes, buffers: Sequence[Buffer]) -> bytes:
    """Return a header and its buffers as one piece, which `split` takes apart."""
    sizes = struct.pack(f"<{len(buffers)}I", *map(len, buffers))
    counts = _counts.pack(len(header), len(buffers))
    return b"".join((counts, sizes, header, *(each.view for each in buffers)))


def split(body: bytes) -> tuple[memoryview, list[Buffer]]:
    """Return what `joined` made one of, in place. Raises `ValueError` of anything else."""
    if len(body) < _counts.size:
        raise ValueError("a message without its sizes")
    header_size, count = _counts.unpack_from(body)
    start = _counts.size + 4 * count
    if start + header_size > len(body):
        raise ValueError("a message that is shorter than its header")
    sizes = struct.unpack_from(f"<{count}I", body, _counts.size)
    if start + header_size + sum(sizes) != len(body):
        raise ValueError("a message whose sizes are not those of its buffers")
    view = memoryview(body)
    header = view[start : start + header_size]
    start += header_size
    buffers = []
    for size in sizes:
        buffers.append(Buffer(view[start : start + size]))
        start += size
    return header, buffers


class Decoder(Generic[T]):
    """Decodes messages of one type, or of one of a union's types.

    Not safe for use by two threads at a time: it holds the buffers of the message being decoded.

    Attributes:
        decode_header: as `decode`, of a message without buffers.
    """

    def __init__(self, kind: Any) -> None:
        self._buffers: Sequence[Buffer] = ()
        self._decoder: msgspec.msgpack.Decoder[T] = msgspec.msgpack.Decoder(
            kind, ext_hook=self._lower, dec_hook=_accept
        )
        self.decode_header: Callable[[bytes | memoryview], T] = self._decoder.decode

    def decode(self, header: "bytes | memoryview", buffers: Sequence[Buffer] = ()) -> T:
        """The message that `header` and `buffers` carry.

        Raises:
            msgspec.DecodeError: malformed, or naming a buffer that is not there.
        """
        self._buffers = buffers
        try:
            return self._decoder.decode(header)
        finally:
            self._buffers = ()

    def _lower(self, code: int, data: memoryview) -> Buffer:
        index = int.from_bytes(data, "little")
        if code != _BUFFER_CODE or index >= len(self._buffers):
            raise msgspec.DecodeError(
                f"extension {code} names buffer {index} of {len(self._buffers)}"
            )
        return self._buffers[index]


def _accept(wanted: type, value: object) -> object:
    if wanted is Buffer and isinstance(value, Buffer):
        return value
    raise msgspec.ValidationError(f"expected {wanted.__name__}, got {type(value).__name__}")
