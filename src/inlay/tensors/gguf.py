"""Header of a GGUF file: its metadata, and where its tensors are. No torch; nothing is executed.

The format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md. Files are made by strangers:
each count and length is compared with the bytes that are left before anything is allocated for it.
Weights are copied and never mapped: a map of a file that shrinks ends the process.
"""

import os
import re
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from inlay.base.errors import InvalidRequestError
from inlay.tensors.blocks import BY_NUMBER, TYPES, Floats, dequantise
from inlay.tensors.tensor import quoted

MAGIC = b"GGUF"
SUFFIX = ".gguf"
_VERSIONS = (2, 3)
_ALIGNMENT = 32
_ALIGNMENTS = (8, 1 << 16)

_MAX_HEADER = 128 << 20
"""Bytes: that of 262,144 tokens with their merges has 20 MB."""
_MAX_ITEMS = 1 << 21
"""Of an array: two million tokens or merges."""
_MAX_TENSORS = 1 << 16
_MAX_KEYS = 1 << 12
_MAX_KEY = 1 << 16
_MAX_NAME = 128
_MAX_DIMENSIONS = 4
_READ = 1 << 20
"""Bytes of the header that are read at a time."""
_RUN = 1 << 18
"""Bytes in which a run of texts is looked for at a time."""
_LONG, _ALONE = 1 << 8, 1 << 12
"""Texts of a run that was worth looking for, and most that are read alone after others."""

_NUMBERS = {
    0: "u1", 1: "i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 7: "u1", 10: "<u8",
    11: "<i8", 12: "<f8",
}  # fmt: skip
"""numpy's dtype for each number of a value's type."""
_BOOL, _STRING, _ARRAY = 7, 8, 9
_LEAST_KEY = 8 + 1 + 4 + 1
_LEAST_TENSOR = 8 + 1 + 4 + 8 + 4 + 8

_PART = re.compile(r"(.+)-(\d{5})-of-(\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class GgufTensor:
    """Location of a tensor.

    Attributes:
        name: as the file has it.
        type: one of `blocks.TYPES`.
        shape: rows last, as torch has it.
        file: the part that holds it.
        offset: of its first block in `file`.
        nbytes: of its blocks.
    """

    name: str
    type: str
    shape: tuple[int, ...]
    file: Path
    offset: int
    nbytes: int

    def read(self) -> Floats:
        """Its values, float32. Raises `InvalidRequestError` as `read_bytes`."""
        raw = read_bytes(self.file, self.offset, self.nbytes)
        return dequantise(self.type, raw, self.shape)


@dataclass(frozen=True, slots=True)
class GgufFile:
    """The header of a file, or of one in several parts.

    Attributes:
        path: of the file, or of the first part.
        metadata: by key: numbers, texts, or lists of them.
        tensors: by name.
    """

    path: Path
    metadata: Mapping[str, Any]
    tensors: Mapping[str, GgufTensor]

    @classmethod
    def open(cls, path: Path) -> "GgufFile":
        """Read and check the header of a file; of any of its parts, those of all.

        Raises:
            InvalidRequestError: not such a file, one that is cut short or contradicts itself, or a
                part that is missing; the message says which, and what is wrong.
        """
        paths = _parts(path)
        headers = [_GgufHeader(part).read() for part in paths]
        metadata = headers[0][0]
        tensors: dict[str, GgufTensor] = {}
        for number, (own, found) in enumerate(headers):
            _check_part(paths[number], own, number, len(paths))
            for tensor in found:
                if tensor.name in tensors:
                    raise _wrong(tensor.file, f"it has tensor {quoted(tensor.name)} twice")
                tensors[tensor.name] = tensor
        total = metadata.get("split.tensors.count", len(tensors))
        if total != len(tensors):
            raise _wrong(
                paths[0], f"its parts hold {len(tensors)} tensors, and {quoted(str(total))} is said"
            )
        return cls(paths[0], metadata, tensors)


def is_gguf(path: Path) -> bool:
    """True for a file that is called after the format, or begins as it does."""
    if not path.is_file():
        return False
    if path.suffix == SUFFIX:
        return True
    try:
        with path.open("rb") as stream:
            return stream.read(len(MAGIC)) == MAGIC
    except OSError:
        return False


def models_in(directory: Path) -> list[Path]:
    """The GGUF models of a directory, sorted: of one in parts the first part."""
    files = sorted(file for file in directory.glob(f"*{SUFFIX}") if file.is_file())
    parts = {file: _PART.fullmatch(file.name) for file in files}
    first = {
        (match[1], match[3]): file for file, match in reversed(parts.items()) if match is not None
    }
    return [file for file, match in parts.items() if match is None or file in first.values()]


def read_bytes(file: Path, offset: int, nbytes: int) -> bytearray:
    """Bytes of a file.

    Raises:
        InvalidRequestError: it cannot be read, or has become shorter.
    """
    found = bytearray(nbytes)
    for _ in read_runs(file, offset, nbytes, memoryview(found)):
        pass
    return found


def read_runs(file: Path, offset: int, nbytes: int, memory: memoryview) -> Iterator[memoryview]:
    """Bytes of a file, as many at a time as `memory` holds; each run lies where the last one did.

    Raises:
        InvalidRequestError: it cannot be read, or has become shorter.
    """
    try:
        with file.open("rb", buffering=0) as stream:
            for at in range(offset, offset + nbytes, max(1, len(memory))):
                run, done = memory[: offset + nbytes - at], 0
                stream.seek(at)
                while done < len(run):
                    count = stream.readinto(run[done:])
                    if not count:
                        raise _wrong(file, f"it ends at byte {at + done}, and was longer before")
                    done += count
                yield run
    except OSError as error:
        raise InvalidRequestError(f"{file} cannot be read: {error.strerror}") from error


def _wrong(file: Path, why: str) -> InvalidRequestError:
    return InvalidRequestError(f"{file} cannot be read as GGUF: {why}", param="model")


def _parts(path: Path) -> list[Path]:
    match = _PART.fullmatch(path.name)
    if match is None:
        return [path]
    count = int(match[3])
    if not 1 <= count <= 9999:
        raise _wrong(path, f"its name says that it is one of {count} parts")
    names = [f"{match[1]}-{number:05}-of-{count:05}{SUFFIX}" for number in range(1, count + 1)]
    missing = [name for name in names if not (path.parent / name).is_file()]
    if missing:
        shown = ", ".join(missing[:3]) + (", ..." if len(missing) > 3 else "")
        raise InvalidRequestError(
            f"{path} is one of {count} parts, and {len(missing)} of them are missing beside it: "
            f"{shown}",
            param="model",
        )
    return [path.parent / name for name in names]


def _check_part(path: Path, metadata: Mapping[str, Any], number: int, count: int) -> None:
    said = metadata.get("split.count", count if count == 1 else None)
    if said in (0, 1) and count == 1:
        return
    if said != count:
        raise _wrong(
            path,
            f"it is part {metadata.get('split.no', 0)} of {quoted(str(said))} by its metadata, and "
            f"its name says {count}; parts are called NAME-00001-of-{count:05}{SUFFIX}",
        )
    if metadata.get("split.no") != number:
        raise _wrong(
            path,
            f"it is part {metadata.get('split.no')} by its metadata, and its name says {number}",
        )


class _GgufHeader:
    """Reads the header of one file from its beginning."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._data = bytearray()
        self._at = 0
        self._size = 0
        self._stream: BinaryIO

    def read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        """Return metadata and tensors."""
        try:
            with self._path.open("rb") as self._stream:
                self._size = os.fstat(self._stream.fileno()).st_size
                return self._read()
        except OSError as error:
            raise InvalidRequestError(f"{self._path} cannot be read: {error.strerror}") from error

    def _read(self) -> tuple[dict[str, Any], list[GgufTensor]]:
        self._check_version()
        tensors, keys = self._count(_MAX_TENSORS, "tensors"), self._count(_MAX_KEYS, "keys")
        self._has_room(tensors * _LEAST_TENSOR + keys * _LEAST_KEY, "what it says of its contents")
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._text(_MAX_KEY, "a key")
            if key in metadata:
                self._refuse(f"it has key {quoted(key)} twice")
            metadata[key] = self._value(self._number("<u4"), key)
        found = [self._tensor() for _ in range(tensors)]
        return metadata, self._located(found, self._alignment(metadata))

    def _check_version(self) -> None:
        magic = bytes(self._take(4, "its first bytes"))
        if magic != MAGIC:
            lfs = "; it is a pointer of Git LFS: `git lfs pull` fetches the file"
            self._refuse(f"it begins with {magic!r}{lfs if magic == b'vers' else ''}")
        version = int(self._number("<u4"))
        if version not in _VERSIONS:
            what = "big-endian" if not version & 0xFFFF else f"of version {version}"
            self._refuse(f"it is {what}; read are little-endian files of versions 2 and 3")

    def _count(self, most: int, what: str) -> int:
        count = int(self._number("<u8"))
        if count > most:
            self._refuse(f"it says that it has {count} {what}; allowed: at most {most}")
        return count

    def _refuse(self, why: str) -> NoReturn:
        raise _wrong(self._path, why)

    def _has_room(self, nbytes: int, what: str) -> None:
        """Refuse what takes more bytes than are left."""
        left = self._size - self._at
        if nbytes > left:
            self._refuse(
                f"it is cut short or damaged: {what} takes at least {nbytes} bytes, and {left} of "
                f"its {self._size} are left: {nbytes - left} are missing"
            )

    def _take(self, nbytes: int, what: str) -> memoryview:
        self._has_room(nbytes, what)
        self._fill(nbytes)
        start = self._at
        self._at += nbytes
        return memoryview(self._data)[start : self._at]

    def _fill(self, nbytes: int) -> None:
        """Have so many bytes, which the file has, after the place reached."""
        end = self._at + nbytes
        if end <= len(self._data):
            return
        if end > _MAX_HEADER:
            self._refuse(f"its header has over {_MAX_HEADER} bytes")
        wanted = min(self._size, max(end, len(self._data) + _READ))
        more = self._stream.read(wanted - len(self._data))
        # A view of it forbids a change of its size.
        self._data = self._data + more
        if end > len(self._data):
            self._refuse("it became shorter while it was read")

    def _number(self, kind: str) -> Any:
        size = int(kind[-1])
        return np.frombuffer(self._take(size, "a number"), kind)[0].item()

    def _text(self, most: int, what: str) -> str:
        length = int(self._number("<u8"))
        self._has_room(length, what)
        if length > most:
            self._refuse(f"{what} has {length} bytes; allowed: at most {most}")
        try:
            return str(self._take(length, what), "utf-8")
        except UnicodeDecodeError as error:
            self._refuse(f"{what} is not UTF-8: {error.reason}")

    def _value(self, kind: int, key: str) -> Any:
        what = f"the value of {quoted(key)}"
        if kind == _STRING:
            return self._text(_MAX_HEADER, what)
        if kind == _ARRAY:
            return self._array(key, what)
        if kind not in _NUMBERS:
            self._refuse(f"{what} has the unknown type {kind}")
        value = self._number(_NUMBERS[kind])
        if kind == _BOOL and value > 1:
            self._refuse(f"{what} is {value}, and true or false by its type")
        return bool(value) if kind == _BOOL else value

    def _array(self, key: str, what: str) -> list[Any]:
        kind, count = int(self._number("<u4")), int(self._number("<u8"))
        least = 8 if kind == _STRING else int(_NUMBERS[kind][-1]) if kind in _NUMBERS else 0
        if not least:
            self._refuse(f"{what} is an array of items of type {kind}; allowed: numbers and texts")
        self._has_room(count * least, what)
        if count > _MAX_ITEMS:
            self._refuse(f"{what} has {count} items; allowed: at most {_MAX_ITEMS}")
        if kind == _STRING:
            return self._texts(count, f"a text of {quoted(key)}")
        values = np.frombuffer(self._take(count * least, what), _NUMBERS[kind])
        found: list[Any] = (values.astype(bool) if kind == _BOOL else values).tolist()
        return found

    def _texts(self, count: int, what: str) -> list[str]:
        """Return so many texts, of which a vocabulary has hundreds of thousands."""
        found: list[str] = []
        alone = 1
        while len(found) < count:
            run = self._short_texts(count - len(found))
            found += run
            # What stops a run, by itself; where runs are short, they are looked for less and less.
            alone = 1 if len(run) >= _LONG else min(2 * alone, _ALONE)
            found += [self._text(_MAX_HEADER, what) for _ in range(min(alone, count - len(found)))]
        return found

    def _short_texts(self, most: int) -> list[str]:
        """Return texts that come next, as far as they are short and at hand.

        Of each a byte of length and seven zeros, where the last one ends, begin it. What is told
        otherwise, what is not UTF-8 and what has zeros of its own ends the run, or is all left.
        """
        if self._at + _ALONE > len(self._data):
            self._fill(min(_READ, min(self._size, _MAX_HEADER) - self._at))
        data = np.frombuffer(self._data, np.uint8)[self._at : self._at + _RUN]
        zero = data == 0
        last = len(data) - 7
        seven = zero[1 : last + 1].copy() if last > 0 else zero[:0]
        for at in range(2, 8):
            seven &= zero[at : last + at]
        starts = np.flatnonzero(seven)[: most + 1]
        if not len(starts) or starts[0]:
            return []
        ends = starts + 8 + data[starts]
        broken = np.flatnonzero(ends[:-1] != starts[1:])
        number = int(broken[0]) if len(broken) else len(starts) - 1
        end = int(starts[number])
        kept = np.ones(end, np.bool_)
        # The last byte of a length, a zero, stays before each text.
        kept[(starts[:number, None] + np.arange(7)).ravel()] = False
        try:
            found = data[:end][kept].tobytes().decode().split("\0")[1:]
        except UnicodeDecodeError:
            return []
        if len(found) != number:
            return []
        self._at += end
        return found

    def _tensor(self) -> tuple[str, str, tuple[int, ...], int]:
        """Return name, type, shape, and offset in the data."""
        name = self._text(_MAX_NAME, "the name of a tensor")
        dimensions = int(self._number("<u4"))
        if not 1 <= dimensions <= _MAX_DIMENSIONS:
            self._refuse(
                f"tensor {quoted(name)} has {dimensions} dimensions; allowed: 1 to "
                f"{_MAX_DIMENSIONS}"
            )
        sizes = np.frombuffer(self._take(8 * dimensions, "a shape"), "<u8").tolist()
        number, offset = int(self._number("<u4")), int(self._number("<u8"))
        kind = BY_NUMBER.get(number)
        if kind is None:
            known = ", ".join(TYPES)
            self._refuse(f"tensor {quoted(name)} is of type {number}, which is not read: {known}")
        shape = tuple(reversed(sizes))
        if not 0 < prod(shape) < 1 << 63 or shape[-1] % kind.elements:
            self._refuse(
                f"tensor {quoted(name)} has shape {shape}, and rows of {kind.name} are whole "
                f"blocks of {kind.elements}"
            )
        return name, kind.name, shape, offset

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        found = metadata.get("general.alignment", _ALIGNMENT)
        least, most = _ALIGNMENTS
        if type(found) is not int or not least <= found <= most or found & (found - 1):
            self._refuse(
                f"general.alignment is {quoted(str(found))}; allowed: a power of two from {least} "
                f"to {most}"
            )
        return found

    def _located(
        self, found: list[tuple[str, str, tuple[int, ...], int]], alignment: int
    ) -> list[GgufTensor]:
        """Return the tensors where they lie in the file; they overlap nowhere and fit into it."""
        begin = -(-self._at // alignment) * alignment
        tensors = [
            GgufTensor(name, kind, shape, self._path, begin + offset, TYPES[kind].size(shape))
            for name, kind, shape, offset in found
        ]
        ((name, times),) = Counter(tensor.name for tensor in tensors).most_common(1) or [("", 0)]
        if times > 1:
            self._refuse(f"it has tensor {quoted(name)} twice")
        whole = max((tensor.offset + tensor.nbytes for tensor in tensors), default=0)
        if whole > self._size:
            self._refuse(
                f"it is cut short: it has {self._size} of {whole} bytes; {whole - self._size} are "
                "missing"
            )
        end, last = begin, ""
        for tensor in sorted(tensors, key=lambda tensor: tensor.offset):
            if (tensor.offset - begin) % alignment:
                self._refuse(
                    f"tensor {quoted(tensor.name)} begins at {tensor.offset - begin} of the data, "
                    f"which is no multiple of {alignment}"
                )
            if tensor.offset < end:
                self._refuse(f"tensors {quoted(last)} and {quoted(tensor.name)} overlap")
            end, last = tensor.offset + tensor.nbytes, tensor.name
        return tensors
