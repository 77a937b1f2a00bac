"""Contents in pieces, which are sealed where there is a key."""

import asyncio
import os
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from io import BytesIO
from typing import BinaryIO

import msgspec

from inlay.base.errors import NoRoomError, NotFoundError, OverloadedError
from inlay.messages.prompt import Buffer
from inlay.store.sealing import CHUNK_BYTES, TAG_BYTES, FileSealer, SealError, sealed_size
from inlay.store.shared import Storage

PIECE_BYTES = 1024 * 1024
"""Bytes of a piece at most: what a reader and a writer of a file hold of it."""

PIECES_HELD = 4
"""Pieces that a content takes in memory while it is sent: one that the connection has, one that
waits for it, and the next, read and opened."""

SALT_BYTES = 32


class Piece(msgspec.Struct, frozen=True, array_like=True):
    """A content that a record names.

    Attributes:
        name: that nothing else has or had.
        size: bytes, before it is sealed.
    """

    name: str
    size: int


def new_name(kind: str = "file") -> str:
    """Return the beginning of the names of some pieces: the time, what they are, random digits."""
    return f"{int(time.time()):010x}-{kind}-{secrets.token_hex(8)}"


def age_of(name: str, now: float) -> float:
    """Return the seconds since a piece's name was made; 0 for a name that is none."""
    digits = name.lstrip("~").partition("-")[0]
    try:
        return now - int(digits, 16)
    except ValueError:
        return 0.0


class Contents:
    """Reads and writes pieces.

    Args:
        storage: keeps them.
        key: of 32 bytes, that they are sealed with; None leaves them as they are.

    Raises:
        InvalidRequestError: as `FileSealer`.
    """

    def __init__(self, storage: Storage, key: bytes | None = None) -> None:
        self._storage = storage
        self._sealer = None if key is None else FileSealer(key)

    async def write(self, name: str, data: bytes) -> Piece:
        """Keep `data` as the piece `name`.

        Raises `OverloadedError`. Where there is no room, nothing of it is left.
        """
        kept = data
        if self._sealer is not None:
            salt = os.urandom(SALT_BYTES)
            chunks = self._sealer.seal(salt).chunks(Buffer(data))
            kept = b"".join([salt, *map(bytes, chunks)])
        try:
            await self._storage.write(name, BytesIO(kept))
        except NoRoomError:
            with suppress(OverloadedError):
                await self._storage.erase(name)
            raise
        return Piece(name, len(data))

    @asynccontextmanager
    async def whole(self) -> AsyncIterator[list[Piece]]:
        """A list for the pieces of one content: where one is refused, the others are erased."""
        written: list[Piece] = []
        try:
            yield written
        except OverloadedError:
            with suppress(OverloadedError):
                await self.erase(written)
            raise

    async def write_file(self, name: str, file: BinaryIO) -> list[Piece]:
        """Keep what is in `file`, from its beginning, as pieces. Raises `OverloadedError`."""
        file.seek(0)
        async with self.whole() as found:
            while data := file.read(PIECE_BYTES):
                found.append(await self.write(f"{name}-{len(found)}", data))
                await asyncio.sleep(0)  # writing to memory lets nobody else run
        return found

    async def read(self, piece: Piece) -> bytes:
        """Return the bytes of a piece.

        Raises:
            NotFoundError: it is gone, or not what was written.
            OverloadedError: the storage does not answer.
        """
        file = BytesIO()
        size = piece.size
        if self._sealer is not None:
            size = SALT_BYTES + sealed_size(piece.size)
        if not await self._storage.read(piece.name, size, file):
            raise NotFoundError("its content is gone")
        if self._sealer is None:
            return file.getvalue()
        try:
            return _opened(self._sealer, file.getbuffer(), piece.size)
        except SealError as error:
            raise NotFoundError("its content was changed") from error

    async def stream(self, pieces: Sequence[Piece], start: int = 0) -> AsyncIterator[bytes]:
        """Yield the bytes of pieces from byte `start` on, a piece at a time. Raises as `read`."""
        for piece in pieces:
            if start < piece.size:
                yield (await self.read(piece))[start:]
            start = max(0, start - piece.size)

    async def erase(self, pieces: Sequence[Piece]) -> None:
        """Remove pieces. Raises `OverloadedError`."""
        for piece in pieces:
            await self._storage.erase(piece.name)


def _opened(sealer: FileSealer, sealed: memoryview, size: int) -> bytes:
    seal = sealer.seal(bytes(sealed[:SALT_BYTES]))
    room = memoryview(bytearray(size))
    at, index = SALT_BYTES, 0
    for start in range(0, size, CHUNK_BYTES):
        stop = min(start + CHUNK_BYTES, size)
        end = at + stop - start + TAG_BYTES
        seal.open_chunk(index, stop == size, sealed[at:end], room[start:stop])
        at, index = end, index + 1
    return bytes(room)
