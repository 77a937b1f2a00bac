"""Messages as bytes: a small msgpack header, and beside it the raw buffers it names.

`encode` never copies a `Buffer`; `decode` gives back buffers that view what it was given.
"""

from collections.abc import Sequence
from typing import Any, TypeVar

import msgspec

from inlay.prompt import Buffer

_BUFFER_CODE = 1

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


def decode(kind: type[T], header: "bytes | memoryview", buffers: Sequence[Buffer] = ()) -> T:
    """The message of type `kind` that `header` and `buffers` carry.

    Raises:
        msgspec.DecodeError: malformed, or naming a buffer that is not there.
    """

    def lower(code: int, data: memoryview) -> Buffer:
        index = int.from_bytes(data, "little")
        if code != _BUFFER_CODE or index >= len(buffers):
            raise msgspec.DecodeError(f"extension {code} names buffer {index} of {len(buffers)}")
        return buffers[index]

    def accept(wanted: type, value: Any) -> Any:
        if wanted is Buffer and isinstance(value, Buffer):
            return value
        raise msgspec.DecodeError(f"expected {wanted.__name__}, got {type(value).__name__}")

    return msgspec.msgpack.Decoder(kind, ext_hook=lower, dec_hook=accept).decode(header)
