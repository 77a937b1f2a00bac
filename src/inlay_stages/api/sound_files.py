"""Sound of an answer as a file: made here of samples, or by the stage that made the sound."""

from typing import Protocol

from inlay.http.server import OFFLOAD_BYTES, Server
from inlay.media.sound_files import FORMATS, sound_writer
from inlay.messages.request import Payload


class SoundFile(Protocol):
    """A file of sound in the making.

    Attributes:
        media_type: of HTTP.
    """

    media_type: bytes

    async def take(self, payload: Payload) -> bytes:
        """Return what the file goes on with once a payload of the last stage is in it."""

    async def end(self) -> bytes:
        """Return its end; the whole file, of one that is sent whole."""


class SampledFile:
    """A `SoundFile` of samples, of one channel.

    Args:
        server: has the threads that compress.
        name: of the format, of `FORMATS`.
        rate: samples a second.
        param: field of the request that names the format.
        whole: it is sent when all of it is made, with its length in its header.

    Raises:
        InvalidRequestError: libsndfile makes no such file, or is not there.
    """

    def __init__(self, server: Server, name: str, rate: int, param: str, *, whole: bool) -> None:
        self.media_type = FORMATS[name].media_type
        self._compressed = bool(FORMATS[name].written)
        self._prepare = server.run_prepared
        self._writer = sound_writer(name, rate, param, whole=whole)

    async def take(self, payload: Payload) -> bytes:
        """As `SoundFile`, of float32 in [-1, 1]; nothing, of a file that is sent whole."""
        return await self._prepare(self._cost(len(payload.data)), self._writer.add, payload.data)

    async def end(self) -> bytes:
        return await self._prepare(self._cost(self._writer.size), self._writer.end)

    def _cost(self, size: int) -> int:
        # A second of sound costs libsndfile milliseconds, however small the file is.
        return OFFLOAD_BYTES if self._compressed else size


class FinishedFile:
    """A `SoundFile` that the last stage has made, with its media type: it is passed on as it is.

    Args:
        whole: it is sent at its end.
    """

    def __init__(self, *, whole: bool) -> None:
        self.media_type = b""
        self._kept: list[bytes] | None = [] if whole else None

    async def take(self, payload: Payload) -> bytes:
        data = bytes(payload.data.view)
        if payload.port.endswith(".type"):
            self.media_type = data
            return b""
        if self._kept is None:
            return data
        self._kept.append(data)
        return b""

    async def end(self) -> bytes:
        return b"".join(self._kept or ())
