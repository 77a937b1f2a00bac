"""Formats and lengths of audio files, from their headers alone, and rows of audio encoders.

As for images, content decides the format, nothing is decoded, and a length is never more than the
bytes can hold: samples that a header promises and the file does not hold are left out. A decoder
may give some samples more or less than an MP3's frames promise; whoever decodes cuts or pads to the
number that is told here, as positions were counted by it.

Sources: RIFF WAVE (Microsoft, 1994), ID3 2.4.0, APEv2, RFC 9639 (FLAC), ISO 11172-3 and 13818-3
(MPEG audio), LAME's info tag.
"""

import struct
from collections.abc import Callable
from functools import partial
from typing import NamedTuple, TypeAlias

import msgspec

from inlay.base.errors import InvalidRequestError
from inlay.media.geometry import Layout, layout_of
from inlay.media.malformed import malformed, unpack
from inlay.messages.prompt import Tokens

_malformed, _unpack = partial(malformed, "audio"), partial(unpack, "audio")

FORMATS = ("WAV", "FLAC", "MP3")
"""Formats that are read."""

CONTAINERS = ("Ogg", "WebM", "MP4", "AAC")
"""Those that `unpacking` makes a WAV of before."""

MAX_SECONDS = 600.0
"""Default bound of an audio file's length."""

_MAX_CHUNKS = 65536
_MAX_TAGS = 8
_MAX_FILLING = 65536
MIN_RATE, MAX_RATE = 1000, 384_000
MAX_CHANNELS = 32


class AudioHeader(NamedTuple):
    """The header of an audio file.

    Attributes:
        format: one of `FORMATS`.
        rate: samples a second of one channel.
        channels: of the file.
        samples: of one channel.
    """

    format: str
    rate: int
    channels: int
    samples: int

    @property
    def seconds(self) -> float:
        """Length."""
        return self.samples / self.rate

    def samples_at(self, rate: int) -> int:
        """Samples of one channel after resampling, rounded up; resampling must give as many."""
        return -(-self.samples * rate // self.rate)


class AudioFrames(msgspec.Struct, frozen=True, kw_only=True, tag="audio_frames"):
    """Spectrum frames that a Whisper-like encoder takes four to a row.

    Families: Qwen2-Audio, Qwen2.5-Omni.

    Attributes:
        rate: samples a second that the encoder takes.
        hop: samples from one frame to the next.
        max_samples: of an item.
        filled: the encoder takes shorter items filled up with silence to `max_samples`.
    """

    rate: int
    hop: int
    max_samples: int
    filled: bool = True

    def layout(self, samples: int) -> Layout:
        """The layout of `samples` samples at `rate`.

        Raises:
            InvalidRequestError: more than `max_samples`, which the encoder would not hear.
        """
        if samples > self.max_samples:
            raise InvalidRequestError(
                f"audio is {samples / self.rate:.1f} s long; this model hears at most "
                f"{self.max_samples / self.rate:g} s of an item"
            )
        frames = -(-samples // self.hop)
        return layout_of([max(0, ((frames - 1) // 2 + 1 - 2) // 2 + 1)], (1, frames))


class AudioChunks(msgspec.Struct, frozen=True, kw_only=True, tag="audio_chunks"):
    """Chunks of one length, filled up with silence, with the same number of rows each.

    Family: Voxtral.

    Attributes:
        rate: samples a second that the encoder takes.
        chunk: samples of a chunk.
        rows: of a chunk.
        start: token before all rows.
    """

    rate: int
    chunk: int
    rows: int
    start: int

    def layout(self, samples: int) -> Layout:
        """The layout of `samples` samples at `rate`."""
        chunks = -(-samples // self.chunk)
        return layout_of([Tokens((self.start,)), chunks * self.rows], (chunks, self.chunk))


AudioGeometry: TypeAlias = AudioFrames | AudioChunks
"""Every kind of layout of audio."""


def read_audio_header(
    data: "bytes | bytearray | memoryview", *, max_seconds: float = MAX_SECONDS
) -> AudioHeader:
    """The header of an audio file.

    Args:
        data: the whole file.
        max_seconds: longest that is allowed.

    Raises:
        InvalidRequestError: not audio of a known format, truncated or contradictory, or too long.
    """
    view = behind_tags(memoryview(data).cast("B"))
    format_, read = _sniff(view)
    rate, channels, samples = read(view, max_seconds)
    if not (MIN_RATE <= rate <= MAX_RATE and 1 <= channels <= MAX_CHANNELS):
        raise _malformed(format_, f"it has {channels} channels at {rate} Hz")
    if samples < 1:
        raise _malformed(format_, "it has no samples")
    if samples > max_seconds * rate:
        raise InvalidRequestError(
            f"audio is {samples / rate:.1f} s long; allowed: {max_seconds:g} s"
        )
    return AudioHeader(format_, rate, channels, samples)


def decodable(data: memoryview, header: AudioHeader) -> "bytes | memoryview":
    """A file that was read, as decoders know it.

    Tags before it are left out. A WAV is its format and its samples, with the length that they have
    here: decoders differ in what they make of one that was never filled in.
    """
    view = behind_tags(data)
    if header.format != "WAV":
        return view
    form, samples = _wav_parts(view)
    form = form[: len(form) & ~1]  # chunks begin at even bytes
    sizes = 20 + len(form) + len(samples), len(form), len(samples)
    riff, fmt, size = (struct.pack("<I", value) for value in sizes)
    return b"".join([b"RIFF", riff, b"WAVEfmt ", fmt, form, b"data", size, samples])


def behind_tags(view: memoryview) -> memoryview:
    """The file behind ID3 and APE tags, which taggers put before files of every format."""
    for _ in range(_MAX_TAGS):
        head = bytes(view[:10])
        if head[:3] == b"ID3":
            sizes = unpack("a tag before audio", "ID3", "4B", view, 6)
            if any(size & 0x80 for size in sizes):
                raise malformed("a tag before audio", "ID3", "its size is wrong")
            size = sizes[0] << 21 | sizes[1] << 14 | sizes[2] << 7 | sizes[3]
            # A footer repeats the head.
            view = view[10 + size + (10 if head[5] & 0x10 else 0) :]
            # Some writers fill up with zeros that the size leaves out.
            filling = bytes(view[:_MAX_FILLING])
            view = view[len(filling) - len(filling.lstrip(b"\0")) :]
        elif head[:8] == b"APETAGEX":
            (size,) = unpack("a tag before audio", "APE", "<I", view, 12)
            view = view[32 + size :]
        else:
            return view
        if not view:
            raise InvalidRequestError("audio holds nothing behind its tag")
    raise InvalidRequestError(f"audio has more than {_MAX_TAGS} tags before it")


_Found: TypeAlias = tuple[int, int, int]
_Reader: TypeAlias = Callable[[memoryview, float], _Found]

_OTHERS = (
    (b"#!AMR", "AMR"),
    (b"FORM", "AIFF"),
    (b".snd", "AU"),
    (b"riff\x2e\x91", "Wave64"),
    (b"MThd", "MIDI"),
    (b"0&\xb2u", "Windows Media (ASF)"),
)


def _sniff(view: memoryview) -> tuple[str, _Reader]:
    head = bytes(view[:16])
    if head[:4] in (b"RIFF", b"RF64", b"BW64") and head[8:12] == b"WAVE":
        return "WAV", _wav
    if head[:4] == b"fLaC":
        return "FLAC", _flac
    if _mpeg_frame(view, 0) is not None:
        return "MP3", _mp3
    looks = f"of no known format begins with {head[:8].hex()}" if head else "is empty"
    for magic, name in _OTHERS:
        if head.startswith(magic):
            looks = f"looks like {name}"
    if (container := container_of(view)) is not None:
        looks = f"looks like {container}"
    raise InvalidRequestError(
        f"audio {looks}; formats that are read: {', '.join((*FORMATS, *CONTAINERS))} (by content)"
    )


def container_of(view: memoryview) -> str | None:
    """Return which of `CONTAINERS` a file is, behind its tags; None for any other.

    Raises:
        InvalidRequestError: a tag before it is malformed.
    """
    head = bytes(behind_tags(view)[:8])
    if head[:4] == b"OggS":
        return "Ogg"
    if head[:4] == b"\x1aE\xdf\xa3":
        return "WebM"
    if head[4:] == b"ftyp":
        return "MP4"
    # A sync word, layer 0: MPEG audio has another.
    return "AAC" if len(head) > 1 and head[0] == 0xFF and head[1] & 0xF6 == 0xF0 else None


def _wav(view: memoryview, max_seconds: float) -> _Found:
    del max_seconds
    form, samples = _wav_parts(view)
    rate, channels, width = _wav_format(form)
    return rate, channels, len(samples) // width


def _wav_parts(view: memoryview) -> tuple[memoryview, memoryview]:
    """The format of a WAV file, and its samples.

    A program that does not know the length yet writes 0, 0xFFFFFFFF or another large number, and
    may never fill it in. Then the samples go on to the end of the file.
    """
    at, form, whole = 12, None, None
    for _ in range(_MAX_CHUNKS):
        kind, length = _unpack("WAV", "<4sI", view, at)
        body = view[at + 8 :]
        if kind == b"data":
            if form is None:
                raise _malformed("WAV", "its samples come before their format")
            if length == 0xFFFFFFFF and whole is not None:
                length = whole
            return form, body if not length and not _is_chunk(body) else body[:length]
        if length > len(body):
            raise _malformed("WAV", "it is truncated")
        if kind == b"fmt ":
            form = body[:length]
        elif kind == b"ds64":  # lengths of 64 bits, of RF64 (EBU Tech 3306)
            (whole,) = _unpack("WAV", "<8xQ", body)
        at += 8 + length + length % 2
    raise _malformed("WAV", f"it has more than {_MAX_CHUNKS} chunks")


def _is_chunk(view: memoryview) -> bool:
    """True where a chunk stands that the rest of a file can hold: then no samples do."""
    if len(view) < 8:
        return True
    kind, length = bytes(view[:4]), int.from_bytes(view[4:8], "little")
    return kind.isascii() and kind.decode("ascii").isprintable() and length <= len(view) - 8


_WAV_BITS = {1: (8, 16, 24, 32), 3: (32, 64), 6: (8,), 7: (8,)}
"""Bits of a sample by kind: integers, floats, A-law, mu-law."""


def _wav_format(body: memoryview) -> tuple[int, int, int]:
    """Rate, channels and bytes of one sample of all channels."""
    kind, channels, rate, _, width, bits = _unpack("WAV", "<HHIIHH", body, 0)
    if kind == 0xFFFE:  # extensible: the kind begins its identifier
        (kind,) = _unpack("WAV", "<H", body, 24)
    if bits not in _WAV_BITS.get(kind, ()):
        raise InvalidRequestError(
            f"audio is a WAV of kind {kind} with {bits} bits; read are integers of 8 to 32 bits, "
            "floats, A-law and mu-law"
        )
    if not channels or width != channels * bits // 8:
        raise _malformed("WAV", f"{channels} channels of {bits} bits take {width} bytes")
    return rate, channels, width


def _flac(view: memoryview, max_seconds: float) -> _Found:
    del max_seconds
    kind, length = _flac_block(view, 4)
    if kind != 0 or length != 34:
        raise _malformed("FLAC", "it does not begin with its stream's facts")
    largest, packed = _unpack("FLAC", ">2xH6xQ", view, 8)
    rate, channels = packed >> 44, (packed >> 41 & 7) + 1
    samples = packed & (1 << 36) - 1
    if not samples:
        raise _malformed("FLAC", "it does not say how many samples it has")
    at = 4
    for _ in range(_MAX_CHUNKS):
        last = view[at] >> 7
        at += 4 + _flac_block(view, at)[1]
        if last:
            break
        _flac_block(view, at)
    # A frame takes at least 6 bytes of header, 2 for each channel's samples, and 2 of checksum.
    frames = max(0, len(view) - at) // (8 + 2 * channels)
    if samples > frames * largest:
        raise _malformed("FLAC", f"{len(view)} bytes cannot hold {samples} samples")
    return rate, channels, samples


def _flac_block(view: memoryview, at: int) -> tuple[int, int]:
    """Kind and length of a metadata block."""
    kind, high, low = _unpack("FLAC", ">BBH", view, at)
    return kind & 0x7F, high << 16 | low


_BITRATES_1 = (0, 32, 40, 48, 56, 64, 80, 96, 112, 128, 160, 192, 224, 256, 320)
_BITRATES_2 = (0, 8, 16, 24, 32, 40, 48, 56, 64, 80, 96, 112, 128, 144, 160)
_RATES = (44100, 48000, 32000)


class _Frame(NamedTuple):
    size: int
    rate: int
    channels: int
    samples: int
    info: int  # where an info tag would stand, from the frame's beginning


def _mpeg_frame(view: memoryview, at: int) -> _Frame | None:
    """The frame of MPEG audio, layer III, that begins at `at`, or None."""
    if at + 4 > len(view) or view[at] != 0xFF or view[at + 1] & 0xE6 != 0xE2:
        return None
    version = view[at + 1] >> 3 & 3  # 0: 2.5, 2: 2, 3: 1
    bitrate, rate, padding = view[at + 2] >> 4, view[at + 2] >> 2 & 3, view[at + 2] >> 1 & 1
    if version == 1 or bitrate in (0, 15) or rate == 3:
        return None
    mono = view[at + 3] >> 6 == 3
    hertz = _RATES[rate] >> (0 if version == 3 else 1 if version == 2 else 2)
    kilobits = (_BITRATES_1 if version == 3 else _BITRATES_2)[bitrate]
    samples = 1152 if version == 3 else 576
    side = (17 if mono else 32) if version == 3 else (9 if mono else 17)
    size = samples // 8 * kilobits * 1000 // hertz + padding
    return _Frame(size, hertz, 1 if mono else 2, samples, 4 + side)


def _mp3(view: memoryview, max_seconds: float) -> _Found:
    at = 0
    first = _mpeg_frame(view, at)
    if first is None:
        raise _malformed("MP3", f"no frame begins at byte {at}")
    trimmed = _info(view, at, first)
    if trimmed is not None:  # the frame of the tag holds no sound
        at += first.size
    samples, most = 0, max_seconds * first.rate
    while samples <= most:
        frame = _mpeg_frame(view, at)
        if frame is None or at + frame.size > len(view):
            break
        if frame.rate != first.rate:
            raise _malformed("MP3", f"its rate changes from {first.rate} to {frame.rate} Hz")
        samples += frame.samples
        at += frame.size
    return first.rate, first.channels, samples - min(samples, trimmed or 0)


def _info(view: memoryview, at: int, frame: _Frame) -> int | None:
    """Samples that an encoder added, by the info tag in a frame; None where it is no tag."""
    tag = at + frame.info
    if bytes(view[tag : tag + 4]) not in (b"Xing", b"Info"):
        return 0 if bytes(view[at + 36 : at + 40]) == b"VBRI" else None
    if tag + 8 > len(view):
        return 0
    (flags,) = _unpack("MP3", ">I", view, tag + 4)
    delays: int = tag + 8 + 4 * (flags & 1) + 4 * (flags >> 1 & 1) + 100 * (flags >> 2 & 1)
    delays += 4 * (flags >> 3 & 1) + 21
    if delays + 3 > min(len(view), at + frame.size):
        return 0
    return (view[delays] << 4 | view[delays + 1] >> 4) + (
        (view[delays + 1] & 15) << 8 | view[delays + 2]
    )
