"""Encryption of files at rest: AES-256-GCM in chunks.

Every file has a key of its own, a keyed BLAKE3 of its 32 random bytes of salt, so nonces need only
differ within a file: they count its chunks and mark the last, so that chunks cannot be swapped,
dropped or added (the STREAM construction of Hoang, Reyhanitabar, Rogaway, Vizár, "Online
Authenticated-Encryption and its Nonce-Reuse Misuse-Resistance", 2015).
"""

import struct
from collections.abc import Iterator

from blake3 import blake3

from inlay.base import extras
from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Buffer

TAG_BYTES = 16
CHUNK_BYTES = 1024 * 1024
KEY_BYTES = 32
FINGERPRINT_BYTES = 8

_nonce = struct.Struct(">3xQB")
_MORE, _LAST, _ALONE = 0, 1, 2


class SealError(Exception):
    """Bytes that this key did not seal, or that have changed since."""


class FileSealer:
    """Makes the seal of each file from one key.

    Attributes:
        fingerprint: 8 bytes that tell two keys apart and reveal neither.

    Raises:
        InvalidRequestError: the key is not 32 bytes, or the `cryptography` package is not there.
    """

    __slots__ = ("_key", "fingerprint")

    def __init__(self, key: bytes) -> None:
        if len(key) != KEY_BYTES:
            raise InvalidRequestError(f"an encryption key is {KEY_BYTES} bytes, got {len(key)}")
        try:
            import cryptography  # noqa: F401
        except ModuleNotFoundError as error:
            raise InvalidRequestError(
                f"encryption at rest needs the cryptography package: {extras.install('encryption')}"
            ) from error
        self._key = key
        self.fingerprint = blake3(
            key, derive_key_context="inlay 2026 encryption fingerprint"
        ).digest(FINGERPRINT_BYTES)

    def seal(self, salt: bytes) -> "Seal":
        return Seal(blake3(salt, key=self._key).digest())


class Seal:
    """Encrypts and decrypts one file."""

    __slots__ = ("_cipher",)

    def __init__(self, key: bytes) -> None:
        from cryptography.hazmat.primitives.ciphers.aead import AESGCM

        self._cipher = AESGCM(key)

    def close(self, data: bytes) -> bytes:
        """A small text apart from the chunks, sealed: `TAG_BYTES` longer."""
        return self._cipher.encrypt(_nonce.pack(0, _ALONE), data, None)

    def open(self, sealed: bytes) -> bytes:
        """The text again. Raises `SealError`."""
        from cryptography.exceptions import InvalidTag

        try:
            return self._cipher.decrypt(_nonce.pack(0, _ALONE), sealed, None)
        except InvalidTag as error:
            raise SealError from error

    def chunks(self, data: Buffer) -> Iterator[memoryview]:
        """`data`, sealed, a chunk at a time; a chunk is valid until the next is asked for."""
        room = memoryview(bytearray(CHUNK_BYTES + TAG_BYTES))
        for index, start, stop, last in _plan(len(data)):
            sealed = room[: stop - start + TAG_BYTES]
            self._cipher.encrypt_into(_nonce.pack(index, last), data.view[start:stop], None, sealed)
            yield sealed

    def open_chunk(self, index: int, last: bool, sealed: memoryview, out: memoryview) -> None:
        """Decrypt chunk `index` into `out`. Raises `SealError`."""
        from cryptography.exceptions import InvalidTag

        try:
            self._cipher.decrypt_into(
                _nonce.pack(index, _LAST if last else _MORE), sealed, None, out
            )
        except InvalidTag as error:
            raise SealError from error


def sealed_size(num_bytes: int) -> int:
    """Bytes of `num_bytes` once sealed."""
    return num_bytes + TAG_BYTES * -(-num_bytes // CHUNK_BYTES)


def _plan(num_bytes: int) -> Iterator[tuple[int, int, int, int]]:
    for index, start in enumerate(range(0, num_bytes, CHUNK_BYTES)):
        stop = min(start + CHUNK_BYTES, num_bytes)
        yield index, start, stop, _LAST if stop == num_bytes else _MORE
