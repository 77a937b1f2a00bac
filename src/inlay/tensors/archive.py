"""The stored records of a zip archive, as `torch.save` writes it.

Every length checked, nothing copied or inflated.

Stricter than zip: the records must tile the file from its first byte to the central directory, each
local header must say what the directory says, and there is no comment, compression, encryption,
split or 64-bit size. Such an archive reads in one way only. Checksums are not verified, as torch
itself does not.

Layout: APPNOTE.TXT 6.3.10 (PKWARE); local header 4.3.7, directory 4.3.12, ends 4.3.14 to 4.3.16.
"""

import struct

from inlay.errors import EmbeddingsError
from inlay.tensors.tensor import quoted, refused

MAX_RECORDS = 64
MAX_NAME_BYTES = 256

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")

_ENCRYPTED, _HAS_DESCRIPTOR, _STRONGLY_ENCRYPTED, _UTF8 = 1 << 0, 1 << 3, 1 << 6, 1 << 11
_ALLOWED_FLAGS = _HAS_DESCRIPTOR | _UTF8


def records(archive: memoryview) -> dict[str, memoryview]:
    """Name and content of every record; contents view `archive`.

    Raises:
        EmbeddingsError: not an archive of at most `MAX_RECORDS` stored records.
    """
    count, directory, end = _directory(archive)
    contents: dict[str, memoryview] = {}
    at, tiled = directory, 0
    for _ in range(count):
        if at + _ENTRY.size > end:
            raise _malformed("its directory is cut short")
        entry = _ENTRY.unpack_from(archive, at)
        (signature, _, _, flags, method, _, _, crc, stored, size, *rest) = entry
        name_length, extra_length, comment_length, disk, _, _, local = rest
        if signature != b"PK\1\2":
            raise _malformed("its directory holds something that is not an entry")
        name_start = at + _ENTRY.size
        at = name_start + name_length + extra_length + comment_length
        if name_length > MAX_NAME_BYTES or at > end:
            raise _malformed(
                f"a record's name or extra field reaches beyond {MAX_NAME_BYTES} bytes or the "
                "directory"
            )
        name_bytes = bytes(archive[name_start : name_start + name_length])
        name = _name(name_bytes)
        if name.endswith(".npy"):
            raise refused("an .npz archive of numpy arrays; send one array as .npy")
        _check_stored(name, flags, method, stored, size, disk)
        if name in contents:
            raise _malformed(f"it holds {quoted(name)} twice")
        if local != tiled:
            raise _malformed(f"record {quoted(name)} does not begin where the one before it ends")
        first, tiled = _locate(archive, name_bytes, (flags, crc, size), local)
        contents[name] = archive[first : first + size]
    if at != end or tiled != directory:
        raise _malformed("there are bytes between its records and its end")
    return contents


def _directory(archive: memoryview) -> tuple[int, int, int]:
    """(number of entries, first byte, past-last byte) of the central directory."""
    at = len(archive) - _END.size
    if at < 0 or bytes(archive[at : at + 4]) != b"PK\5\6":
        raise _malformed(
            "it does not end with an end-of-directory record (cut short, or followed by something)"
        )
    _, disk, start_disk, here, count, size, start, comment = _END.unpack_from(archive, at)
    if disk or start_disk or here != count or comment:
        raise _malformed("it is split over several files or carries a comment")
    end = at
    locator = at - _LOCATOR64.size
    if locator >= _END64.size and bytes(archive[locator : locator + 4]) == b"PK\6\7":
        end = locator - _END64.size
        _check_end64(archive, end, count, size, start)
    if start + size != end:
        raise _malformed("its directory is not where its end says")
    if count > MAX_RECORDS:
        raise refused(
            f"an archive of {count} records, which is more than one tensor; allowed: at most "
            f"{MAX_RECORDS} records"
        )
    return count, start, end


def _check_end64(archive: memoryview, at: int, count: int, size: int, start: int) -> None:
    """The 64-bit end, which torch writes beside the 32-bit one, must agree with it."""
    _, locator_disk, offset, disks = _LOCATOR64.unpack_from(archive, at + _END64.size)
    signature, length, _, _, disk, start_disk, *rest = _END64.unpack_from(archive, at)
    if (
        signature != b"PK\6\6"
        or length != _END64.size - 12
        or offset != at
        or locator_disk
        or disks != 1
        or disk
        or start_disk
        or rest != [count, count, size, start]
    ):
        raise _malformed("its 64-bit end and its 32-bit end disagree")


def _check_stored(name: str, flags: int, method: int, stored: int, size: int, disk: int) -> None:
    if flags & (_ENCRYPTED | _STRONGLY_ENCRYPTED):
        raise refused(f"an archive whose record {quoted(name)} is encrypted")
    if method:
        how = {8: "deflated"}.get(method, f"compressed by method {method}")
        raise refused(
            f"an archive whose record {quoted(name)} is {how}; only stored records are read"
        )
    if flags & ~_ALLOWED_FLAGS or disk or stored != size or size == 0xFFFFFFFF:
        raise _malformed(
            f"record {quoted(name)} has flags {flags:#x}, stored size {stored} and size {size}"
        )


def _locate(
    archive: memoryview, name: bytes, wanted: tuple[int, int, int], at: int
) -> tuple[int, int]:
    """(start of the content, end of the record) of the record with its local header at `at`."""
    flags, crc, size = wanted
    if at + _LOCAL.size > len(archive):
        raise _malformed("a record begins beyond its end")
    header = _LOCAL.unpack_from(archive, at)
    (
        signature,
        _,
        local_flags,
        method,
        _,
        _,
        local_crc,
        stored,
        local_size,
        name_length,
        extra_length,
    ) = header
    name_start = at + _LOCAL.size
    first = name_start + name_length + extra_length
    end = first + size
    deferred = flags & _HAS_DESCRIPTOR and (local_crc, stored, local_size) == (0, 0, 0)
    if (
        signature != b"PK\3\4"
        or method
        or local_flags != flags
        or not (deferred or (local_crc, stored, local_size) == (crc, size, size))
        or bytes(archive[name_start : name_start + name_length]) != name
        or end > len(archive)
    ):
        raise _malformed("a record's own header and the directory disagree")
    if flags & _HAS_DESCRIPTOR:
        if end + _DESCRIPTOR.size > len(archive) or _DESCRIPTOR.unpack_from(archive, end) != (
            b"PK\7\x08",
            crc,
            size,
            size,
        ):
            raise _malformed("a record's descriptor and the directory disagree")
        end += _DESCRIPTOR.size
    return first, end


def _name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _malformed("a record's name is not UTF-8") from error


def _malformed(why: str) -> EmbeddingsError:
    return refused(f"a zip archive that torch.save did not write: {why}")
