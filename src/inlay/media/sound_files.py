"""Files of sound, made piece by piece: WAV and bare samples here, the others by libsndfile."""

import struct
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

import numpy as np
import numpy.typing as npt

from inlay.base.errors import InvalidRequestError
from inlay.messages.prompt import Buffer

WAV_HEADER_BYTES = 44

_UNKNOWN = 0xFFFFFFFF
"""Length in the header of a WAV file that is sent while it is made."""


class SoundFormat(NamedTuple):
    """A format of files of sound.

    Attributes:
        media_type: of HTTP.
        streamed: it is sent while it is made, unless a request says otherwise.
        written: arguments of `soundfile.SoundFile`; none of formats that are written here.
    """

    media_type: bytes
    streamed: bool
    written: Mapping[str, Any] = {}


# 64 kbit a second, MP3 constantly so: a player tells the time in a stream by its bytes.
_MP3 = {
    "format": "MP3",
    "subtype": "MPEG_LAYER_III",
    "bitrate_mode": "CONSTANT",
    "compression_level": 0.6,
}
_OPUS = {"format": "OGG", "subtype": "OPUS", "compression_level": 0.76}
_FLAC = {"format": "FLAC", "subtype": "PCM_16"}

FORMATS: Mapping[str, SoundFormat] = {
    "mp3": SoundFormat(b"audio/mpeg", True, _MP3),
    "opus": SoundFormat(b"audio/ogg", True, _OPUS),
    "flac": SoundFormat(b"audio/flac", False, _FLAC),
    "wav": SoundFormat(b"audio/wav", False),
    "pcm": SoundFormat(b"audio/pcm", True),
}
"""Formats by OpenAI's names for them."""

MEDIA_TYPES = tuple(kind.media_type.decode() for kind in FORMATS.values())


class SoundWriter(Protocol):
    """Makes the bytes of a file. Its calls follow each other, from any thread."""

    @property
    def size(self) -> int:
        """Bytes that are kept here."""

    def add(self, sound: Buffer) -> bytes:
        """Return what the file goes on with once `sound`, float32 in [-1, 1], is in it.

        Nothing, of a file that is made whole.
        """

    def end(self) -> bytes:
        """Return its end; the whole file, of one that is made whole."""


def sound_writer(name: str, rate: int, param: str, *, whole: bool) -> SoundWriter:
    """Return what makes a file of sound of one channel.

    Args:
        name: of the format, of `FORMATS`.
        rate: samples a second.
        param: field of the request that names the format.
        whole: it is used when all of it is made, with its length in its header.

    Raises:
        InvalidRequestError: libsndfile makes no such file, or is not there.
    """
    written = FORMATS[name].written
    if not written:
        return _Samples(rate, header=name == "wav", whole=whole)
    try:
        return _Encoded(written, rate, whole=whole)
    except (ImportError, OSError) as error:
        why = f"this machine lacks libsndfile, which makes such files ({error})"
    except RuntimeError:
        why = f"the sound has {rate} samples a second, of which there are no such files"
    raise InvalidRequestError(
        f"{param} is {name!r}; {why}; WAV and bare samples are always made", param=param
    )


class _Samples:
    """Samples of 16 bits, little endian, behind the header of a WAV file or none."""

    def __init__(self, rate: int, *, header: bool, whole: bool) -> None:
        self._rate = rate
        self._header = header
        self._pieces: list[bytes] | None = [] if whole else None
        self._begun = False
        self.size = 0

    def add(self, sound: Buffer) -> bytes:
        samples = _pcm16(sound)
        if self._pieces is not None:
            self._pieces.append(samples)
            self.size += len(samples)
            return b""
        return self._begin() + samples

    def end(self) -> bytes:
        if self._pieces is None:
            return self._begin()
        header = wav_header(self._rate, self.size) if self._header else b""
        return b"".join([header, *self._pieces])

    def _begin(self) -> bytes:
        begun, self._begun = self._begun, True
        return b"" if begun or not self._header else wav_header(self._rate, None)


class _Sink:
    """Target of libsndfile, which goes back to the header at the end, when the length is known.

    Args:
        whole: what is written stays; else only its place is known once it was taken.
    """

    def __init__(self, *, whole: bool) -> None:
        self._whole = whole
        self._data = bytearray()
        self._taken = 0
        self._at = 0

    def write(self, data: Any) -> int:
        """Write at the place where it stands; what was taken already is not changed."""
        written = bytes(data)
        start = self._at - self._taken
        self._at += len(written)
        kept = written[max(0, -start) :]
        if kept:
            begin = max(0, start)
            self._data[begin : begin + len(kept)] = kept
        return len(written)

    def seek(self, offset: int, whence: int = 0) -> int:
        """Go to a place."""
        base = (0, self._at, self._taken + len(self._data))[whence]
        self._at = base + offset
        return self._at

    def tell(self) -> int:
        """Return the place where it stands."""
        return self._at

    def read(self, _: int = -1) -> bytes:
        """Return nothing: there is nobody who reads."""
        return b""

    def flush(self) -> None:
        """Nothing waits."""

    def take(self) -> bytes:
        """Return what has come since; of a whole file nothing."""
        if self._whole:
            return b""
        found = bytes(self._data)
        self._taken += len(found)
        self._data.clear()
        return found

    def all(self) -> bytes:
        """Return all that was not taken."""
        return bytes(self._data)


class _Encoded:
    """A file that libsndfile writes. Raises as `soundfile.SoundFile`."""

    size = 0

    def __init__(self, written: Mapping[str, Any], rate: int, *, whole: bool) -> None:
        import soundfile

        self._sink = _Sink(whole=whole)
        self._file = soundfile.SoundFile(self._sink, "w", samplerate=rate, channels=1, **written)
        self._begun = False

    def add(self, sound: Buffer) -> bytes:
        self._write(np.frombuffer(_pcm16(sound), np.int16))
        return self._sink.take()

    def _write(self, samples: npt.NDArray[np.int16]) -> None:
        self._begun = self._begun or len(samples) > 0
        self._file.write(samples)

    def end(self) -> bytes:
        """As `SoundWriter`; a file without samples, which some formats have not, has silence."""
        if not self._begun:
            self._write(np.zeros(1, np.int16))
        self._file.close()
        return self._sink.all()


def _pcm16(data: Buffer) -> bytes:
    """Return float32 samples as 16 bits, little endian; those beyond [-1, 1] are its ends."""
    samples = np.frombuffer(data.view, np.float32).astype(np.float64)
    within: npt.NDArray[np.float64] = samples.clip(-1.0, 1.0)
    return np.rint(32767 * within).astype("<i2").tobytes()


def wav_header(rate: int, num_bytes: int | None) -> bytes:
    """Return the header of a WAV file of 16 bit samples of one channel.

    Args:
        rate: samples a second.
        num_bytes: of all samples; None where they are not known yet: readers go on to the end.
    """
    riff, data = (_UNKNOWN, _UNKNOWN) if num_bytes is None else (36 + num_bytes, num_bytes)
    return struct.pack(
        "<4sI4s4sIHHIIHH4sI",
        *(b"RIFF", riff, b"WAVE", b"fmt ", 16, 1, 1, rate, 2 * rate, 2, 16, b"data", data),
    )
