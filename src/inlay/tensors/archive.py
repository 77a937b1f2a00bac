"""The stored records of a zip archive, as `torch.save` writes it.

Every length checked, nothing copied or inflated.

Stricter than zip: the records must tile the file from its first byte to the central directory, each
local header must say what the directory says, and there is no comment, compression, encryption or
split, nor, unless asked for, a 64-bit size. Such an archive reads in one way only. Checksums are
not verified, as torch itself does not.

Layout: APPNOTE.TXT 6.3.10 (PKWARE); local header 4.3.7, directory 4.3.12, ends 4.3.14 to 4.3.16.
"""

import struct

from inlay.base.errors import EmbeddingsError
from inlay.tensors.tensor import quoted, refused

MAX_RECORDS = 64
MAX_LARGE_RECORDS = 200_000
MAX_NAME_BYTES = 256

_LOCAL = struct.Struct("<4sHHHHHIIIHH")
_DESCRIPTOR = struct.Struct("<4sIII")
_DESCRIPTOR64 = struct.Struct("<4sIQQ")
_ENTRY = struct.Struct("<4sHHHHHHIIIHHHHHII")
_END = struct.Struct("<4sHHHHIIH")
_END64 = struct.Struct("<4sQHHIIQQQQ")
_LOCATOR64 = struct.Struct("<4sIQI")

_ENCRYPTED, _HAS_DESCRIPTOR, _STRONGLY_ENCRYPTED, _UTF8 = 1 << 0, 1 << 3, 1 << 6, 1 << 11
_ALLOWED_FLAGS = _HAS_DESCRIPTOR | _UTF8


_IN_64_BITS = 0xFFFFFFFF
"""A size or an offset that stands in the extra field, with 64 bits."""
_EXTRA64 = 1


def records(archive: memoryview, *, large: bool = False) -> dict[str, memoryview]:
    """Name and content of every record; contents view `archive`.

    Args:
        archive: the file.
        large: take up to `MAX_LARGE_RECORDS` records and sizes of 64 bits, in a file of any size.

    Raises:
        EmbeddingsError: not an archive of at most `MAX_RECORDS` stored records.
    """
    count, directory, end = _directory(archive, MAX_LARGE_RECORDS if large else MAX_RECORDS)
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
        extra_start = name_start + name_length
        at = extra_start + extra_length + comment_length
        if name_length > MAX_NAME_BYTES or at > end:
            raise _malformed(
                f"a record's name or extra field reaches beyond {MAX_NAME_BYTES} bytes or the "
                "directory"
            )
        name_bytes = bytes(archive[name_start : name_start + name_length])
        name = _name(name_bytes)
        if name.endswith(".npy"):
            raise refused("an .npz archive of numpy arrays; send one array as .npy")
        wide = large and _IN_64_BITS in (size, local)
        if wide:
            extra = bytes(archive[extra_start : extra_start + extra_length])
            stored, size, local = _in_64_bits(name, extra, (size, stored, local))
        _check_stored(name, flags, method, stored, size, disk, large=large)
        if name in contents:
            raise _malformed(f"it holds {quoted(name)} twice")
        if local != tiled:
            raise _malformed(f"record {quoted(name)} does not begin where the one before it ends")
        first, tiled = _locate(archive, name_bytes, (flags, crc, size), local, wide=wide)
        contents[name] = archive[first : first + size]
    if at != end or tiled != directory:
        raise _malformed("there are bytes between its records and its end")
    return contents


def _in_64_bits(name: str, extra: bytes, said: tuple[int, int, int]) -> tuple[int, int, int]:
    """(stored size, size, offset) of a record, those of 64 bits out of its extra field (4.5.3)."""
    at, wanted = 0, [index for index, each in enumerate(said) if each == _IN_64_BITS]
    found = list(said)
    while at + 4 <= len(extra):
        kind, length = struct.unpack_from("<HH", extra, at)
        if kind == _EXTRA64 and length == 8 * len(wanted) and at + 4 + length <= len(extra):
            for index, value in zip(
                wanted, struct.unpack_from(f"<{len(wanted)}Q", extra, at + 4), strict=True
            ):
                found[index] = value
            size, stored, local = found
            return stored, size, local
        at += 4 + length
    raise _malformed(f"record {quoted(name)} lacks its sizes of 64 bits")


def _directory(archive: memoryview, most: int) -> tuple[int, int, int]:
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
        count, size, start = _end64(archive, end, (count, size, start))
    if start + size != end:
        raise _malformed("its directory is not where its end says")
    if count > most:
        raise refused(
            f"an archive of {count} records, which is more than one tensor; allowed: at most "
            f"{most} records"
        )
    return count, start, end


def _end64(archive: memoryview, at: int, said: tuple[int, int, int]) -> tuple[int, int, int]:
    """(entries, size, start) by the 64-bit end, which must agree with what the 32-bit one said."""
    _, locator_disk, offset, disks = _LOCATOR64.unpack_from(archive, at + _END64.size)
    signature, length, _, _, disk, start_disk, here, *found = _END64.unpack_from(archive, at)
    count, size, start = found
    if (
        signature != b"PK\6\6"
        or length != _END64.size - 12
        or offset != at
        or locator_disk
        or disks != 1
        or disk
        or start_disk
        or here != count
        or said != (min(count, 0xFFFF), min(size, _IN_64_BITS), min(start, _IN_64_BITS))
    ):
        raise _malformed("its 64-bit end and its 32-bit end disagree")
    return count, size, start


def _check_stored(
    name: str, flags: int, method: int, stored: int, size: int, disk: int, *, large: bool
) -> None:
    if flags & (_ENCRYPTED | _STRONGLY_ENCRYPTED):
        raise refused(f"an archive whose record {quoted(name)} is encrypted")
    if method:
        how = {8: "deflated"}.get(method, f"compressed by method {method}")
        raise refused(
            f"an archive whose record {quoted(name)} is {how}; only stored records are read"
        )
    too_large = size == _IN_64_BITS and not large
    if flags & ~_ALLOWED_FLAGS or disk or stored != size or too_large:
        raise _malformed(
            f"record {quoted(name)} has flags {flags:#x}, stored size {stored} and size {size}"
        )


def _locate(
    archive: memoryview, name: bytes, wanted: tuple[int, int, int], at: int, *, wide: bool
) -> tuple[int, int]:
    """(start of the content, end of the record) of the record with its local header at `at`.

    `wide`: it has sizes of 64 bits.
    """
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
        or (wide and not deferred)
        or bytes(archive[name_start : name_start + name_length]) != name
        or end > len(archive)
    ):
        raise _malformed("a record's own header and the directory disagree")
    if flags & _HAS_DESCRIPTOR:
        form = _DESCRIPTOR64 if wide else _DESCRIPTOR
        if end + form.size > len(archive) or form.unpack_from(archive, end) != (
            b"PK\7\x08",
            crc,
            size,
            size,
        ):
            raise _malformed("a record's descriptor and the directory disagree")
        end += form.size
    return first, end


def _name(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError as error:
        raise _malformed("a record's name is not UTF-8") from error


def _malformed(why: str) -> EmbeddingsError:
    return refused(f"a zip archive that torch.save did not write: {why}")
