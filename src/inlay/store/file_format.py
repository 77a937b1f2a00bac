"""The files of a disk tier: one header page, then one payload, plain or sealed.

The payload of a stored prompt is the elements of a tensor; that of a run of pages, their records.

    0     magic, version, length of the description, length of the payload
    24    fingerprints of the secret and of the encryption key (zeros: not encrypted), salt
    72    BLAKE3 of the payload as it lies in the file
    104   keyed BLAKE3 of the whole page, these 32 bytes as zeros
    136   the description in msgpack, zeros up to 4096
    4096  the payload; elements in C order, little endian

All little endian. Without the secret no valid header can be made or changed, because of the keyed
digest; the payload's digest in it covers the rest. No field is trusted, and no length used, before
that digest is checked.
"""

import os
import secrets
import struct
from collections.abc import Iterator
from typing import Generic, Protocol, TypeVar

import msgspec
import numpy as np
from blake3 import blake3

from inlay.messages.prompt import Buffer
from inlay.store.entry import PAGE
from inlay.store.sealing import CHUNK_BYTES, TAG_BYTES, FileSealer, Seal, SealError, sealed_size

MAGIC = b"inlay pe"
VERSION = 1
HEADER_BYTES = PAGE
SALT_BYTES = 32
DIGEST_BYTES = 32

_fixed = struct.Struct("<8sHxxIQ8s8s32s32s32s")
_MAC_AT = _fixed.size - DIGEST_BYTES
_NO_KEY = bytes(8)
_encoder = msgspec.msgpack.Encoder()


class PayloadDescription(Protocol):
    """Description of a payload; a msgspec type."""

    @property
    def num_bytes(self) -> int:
        """Bytes of the payload before it is sealed."""


class FileKeys(Protocol):
    """Keys that only files of one kind and secret are written with."""

    @property
    def file_key(self) -> bytes:
        """32 bytes that authenticate the files."""

    @property
    def fingerprint(self) -> bytes:
        """8 bytes that tell two secrets apart and reveal neither."""


D = TypeVar("D", bound=PayloadDescription)


class DamagedFileError(Exception):
    """A file that is torn, changed, of another format, or written under another secret."""


class LockedFileError(Exception):
    """A sound file whose encryption key we do not have."""


class Header(msgspec.Struct, Generic[D], frozen=True):
    """A header that was found sound.

    Attributes:
        description: of the payload.
        payload_bytes: bytes that follow the header.
        payload_digest: their BLAKE3.
        seal: what decrypts them, or None.
    """

    description: D
    payload_bytes: int
    payload_digest: bytes
    seal: Seal | None


class FileFormat(Generic[D]):
    """Writes and reads files under one secret and, if given, one encryption key."""

    __slots__ = ("_decoder", "_keys", "_sealer")

    def __init__(self, keys: FileKeys, sealer: FileSealer | None, description: type[D]) -> None:
        self._keys = keys
        self._sealer = sealer
        self._decoder = msgspec.msgpack.Decoder(description)

    def file_size(self, num_bytes: int) -> int:
        """Bytes of the file of a payload of `num_bytes`."""
        return HEADER_BYTES + (num_bytes if self._sealer is None else sealed_size(num_bytes))

    def write(self, descriptor: int, description: D, data: Buffer) -> None:
        """Write a whole file to an empty one. Raises `OSError`."""
        salt = secrets.token_bytes(SALT_BYTES)
        seal = None if self._sealer is None else self._sealer.seal(salt)
        os.lseek(descriptor, HEADER_BYTES, os.SEEK_SET)
        hasher = blake3()
        for chunk in _plain_chunks(data) if seal is None else seal.chunks(data):
            hasher.update(chunk)
            _write_all(descriptor, chunk)
        text = _encoder.encode(description)
        if seal is not None:
            text = seal.close(text)
        page = bytearray(HEADER_BYTES)
        _fixed.pack_into(
            page,
            0,
            MAGIC,
            VERSION,
            len(text),
            self.file_size(description.num_bytes) - HEADER_BYTES,
            self._keys.fingerprint,
            _NO_KEY if self._sealer is None else self._sealer.fingerprint,
            salt,
            hasher.digest(DIGEST_BYTES),
            bytes(DIGEST_BYTES),
        )
        page[_fixed.size : _fixed.size + len(text)] = text
        page[_MAC_AT : _fixed.size] = blake3(page, key=self._keys.file_key).digest(DIGEST_BYTES)
        os.lseek(descriptor, 0, os.SEEK_SET)
        _write_all(descriptor, memoryview(page))

    def read_header(self, descriptor: int) -> Header[D]:
        """Check and decode the header, and that the file is as long as it says.

        Raises:
            DamagedFileError: the file is not a whole one of ours.
            LockedFileError: it is, but sealed with a key we do not have.
            OSError: it cannot be read.
        """
        size = os.fstat(descriptor).st_size
        page = bytearray(HEADER_BYTES)
        if os.preadv(descriptor, [page], 0) < HEADER_BYTES:
            raise DamagedFileError(f"torn: {size} bytes are less than a header")
        magic, version, length, payload_bytes, fingerprint, key_fingerprint, salt, digest, mac = (
            _fixed.unpack_from(page)
        )
        if magic != MAGIC:
            raise DamagedFileError("not of this format")
        if version != VERSION:
            raise DamagedFileError(f"of version {version}; this build reads {VERSION}")
        if fingerprint != self._keys.fingerprint:
            raise DamagedFileError(
                f"written under the secret {fingerprint.hex()}; ours is "
                f"{self._keys.fingerprint.hex()}"
            )
        page[_MAC_AT : _fixed.size] = bytes(DIGEST_BYTES)
        if not secrets.compare_digest(
            mac, blake3(page, key=self._keys.file_key).digest(DIGEST_BYTES)
        ):
            raise DamagedFileError("its header does not match its checksum")
        if size != HEADER_BYTES + payload_bytes:
            raise DamagedFileError(f"torn: {size} bytes of {HEADER_BYTES + payload_bytes}")
        text = bytes(page[_fixed.size : _fixed.size + length])
        seal = self._seal_of(key_fingerprint, salt)
        try:
            if seal is not None:
                text = seal.open(text)
            description = self._decoder.decode(text)
        except (SealError, msgspec.DecodeError, msgspec.ValidationError) as error:
            raise DamagedFileError("its description cannot be read") from error
        return Header(description, payload_bytes, digest, seal)

    @staticmethod
    def check(header: Header[D], description: D) -> None:
        """Raises `DamagedFileError` for the header of another payload."""
        if header.description != description:
            raise DamagedFileError("it holds something else")

    def read_payload(self, descriptor: int, header: Header[D]) -> Buffer:
        """The payload.

        Raises:
            DamagedFileError: they do not match their checksum.
            OSError: they cannot be read.
        """
        # Not a bytearray: that would be filled with zeros first.
        view = np.empty(header.description.num_bytes, np.uint8).data
        hasher = blake3()
        os.lseek(descriptor, HEADER_BYTES, os.SEEK_SET)
        if header.seal is None:
            for start in range(0, len(view), CHUNK_BYTES):
                chunk = view[start : start + CHUNK_BYTES]
                _read_all(descriptor, chunk)
                hasher.update(chunk)
        else:
            room = memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
            for index, start in enumerate(range(0, len(view), CHUNK_BYTES)):
                chunk = view[start : start + CHUNK_BYTES]
                sealed = room[: len(chunk) + TAG_BYTES]
                _read_all(descriptor, sealed)
                hasher.update(sealed)
                try:
                    header.seal.open_chunk(index, start + len(chunk) == len(view), sealed, chunk)
                except SealError as error:
                    raise DamagedFileError(f"its chunk {index} cannot be decrypted") from error
        if not secrets.compare_digest(hasher.digest(DIGEST_BYTES), header.payload_digest):
            raise DamagedFileError("its payload does not match its checksum")
        return Buffer(view)

    def _seal_of(self, key_fingerprint: bytes, salt: bytes) -> Seal | None:
        if key_fingerprint == _NO_KEY:
            return None
        if self._sealer is None:
            raise LockedFileError(f"sealed with the key {key_fingerprint.hex()}; we have none")
        if key_fingerprint != self._sealer.fingerprint:
            raise LockedFileError(
                f"sealed with the key {key_fingerprint.hex()}; ours is "
                f"{self._sealer.fingerprint.hex()}"
            )
        return self._sealer.seal(salt)


def _plain_chunks(data: Buffer) -> Iterator[memoryview]:
    for start in range(0, len(data), CHUNK_BYTES):
        yield data.view[start : start + CHUNK_BYTES]


def _write_all(descriptor: int, data: memoryview) -> None:
    while data:
        data = data[os.write(descriptor, data) :]


def _read_all(descriptor: int, out: memoryview) -> None:
    while out:
        count = os.readv(descriptor, [out])
        if count == 0:
            raise DamagedFileError("torn while it was read")
        out = out[count:]
