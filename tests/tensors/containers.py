"""Files built byte by byte, so that tests can make them lie.

Zip archives, pickles of tensors, safetensors, npy.
"""

import json
import struct
from collections.abc import Sequence
from typing import Any, NamedTuple
from zlib import crc32


class Record(NamedTuple):
    """A record of an archive; fields left None say the truth."""

    name: str
    content: bytes
    method: int = 0
    flags: int = 0
    size: int | None = None
    offset: int | None = None
    local_name: str | None = None
    local_size: int | None = None
    local_flags: int | None = None
    extra: bytes = b""


def archive(
    records: Sequence[Record],
    *,
    count: int | None = None,
    directory_offset: int | None = None,
    gap: bytes = b"",
    comment: bytes = b"",
) -> bytes:
    """A zip archive of `records`, with an end that lies where told to."""
    body, directory = b"", b""
    for record in records:
        at = len(body)
        name = record.name.encode()
        local_name = name if record.local_name is None else record.local_name.encode()
        size = len(record.content) if record.size is None else record.size
        local_size = size if record.local_size is None else record.local_size
        flags = record.flags if record.local_flags is None else record.local_flags
        crc = crc32(record.content)
        body += struct.pack(
            "<4sHHHHHIIIHH",
            b"PK\3\4",
            20,
            flags,
            record.method,
            0,
            0,
            crc,
            local_size,
            local_size,
            len(local_name),
            len(record.extra),
        )
        body += local_name + record.extra + record.content
        offset = at if record.offset is None else record.offset
        directory += struct.pack(
            "<4sHHHHHHIIIHHHHHII",
            b"PK\1\2",
            20,
            20,
            record.flags,
            record.method,
            0,
            0,
            crc,
            size,
            size,
            len(name),
            0,
            0,
            0,
            0,
            0,
            offset,
        )
        directory += name
    entries = len(records) if count is None else count
    start = len(body) + len(gap) if directory_offset is None else directory_offset
    end = struct.pack(
        "<4sHHHHIIH", b"PK\5\6", 0, 0, entries, entries, len(directory), start, len(comment)
    )
    return body + gap + directory + end + comment


def text(value: str) -> bytes:
    """The opcode that pushes a string."""
    return b"X" + struct.pack("<I", len(value.encode())) + value.encode()


def name(module: str, attribute: str) -> bytes:
    """The opcode that pushes a module's attribute."""
    return f"c{module}\n{attribute}\n".encode()


def number(value: int) -> bytes:
    """The opcode that pushes an integer of up to eight bytes."""
    return b"\x8a\x08" + value.to_bytes(8, "little", signed=True)


def numbers(values: Sequence[int]) -> bytes:
    """The opcodes that push a tuple of integers."""
    return b"(" + b"".join(map(number, values)) + b"t"


HOOKS = name("collections", "OrderedDict") + b")R"


def storage(
    length: int, kind: bytes = name("torch", "FloatStorage"), key: str = "0", device: str = "cpu"
) -> bytes:
    """The opcodes that push a storage."""
    return b"(" + text("storage") + kind + text(key) + text(device) + number(length) + b"tQ"


def tensor(
    shape: Sequence[int],
    strides: Sequence[int],
    *,
    offset: int = 0,
    length: int,
    kind: bytes = name("torch", "FloatStorage"),
    device: str = "cpu",
    tail: bytes = b"\x89" + HOOKS,
    rebuild: bytes = name("torch._utils", "_rebuild_tensor_v2"),
) -> bytes:
    """The opcodes that push a tensor."""
    pushed = (
        storage(length, kind, device=device) + number(offset) + numbers(shape) + numbers(strides)
    )
    return rebuild + b"(" + pushed + tail + b"tR"


def pickled(opcodes: bytes) -> bytes:
    """A whole pickle of protocol 2."""
    return b"\x80\x02" + opcodes + b"."


def torch_file(opcodes: bytes, data: bytes, *more: Record) -> bytes:
    """A torch.save file whose pickle is `opcodes` and whose storage "0" is `data`."""
    return archive(
        [
            Record("archive/data.pkl", pickled(opcodes)),
            Record("archive/byteorder", b"little"),
            Record("archive/data/0", data),
            Record("archive/version", b"3\n"),
            *more,
        ]
    )


def safetensors_file(
    header: dict[str, Any] | bytes, data: bytes, *, length: int | None = None
) -> bytes:
    """A safetensors file with any header."""
    raw = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(raw) if length is None else length) + raw + data


def npy_file(header: str, data: bytes, *, version: int = 1, length: int | None = None) -> bytes:
    """A .npy file with any header."""
    raw = header.encode("latin-1").ljust(117) + b"\n"
    size = struct.pack("<H" if version == 1 else "<I", len(raw) if length is None else length)
    return b"\x93NUMPY" + bytes((version, 0)) + size + raw + data
