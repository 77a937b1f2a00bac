"""Sound in containers that other readers do not know, made a WAV file of.

Ogg, WebM, MP4 (M4A) and bare AAC, as browsers and telephones record them. What comes out is a file
like any other: sized by its header, and heard by every engine. FFmpeg decodes (`decoder`), and its
output ends the process once it is longer than sound may be, whatever the file says.
"""

import struct
from collections.abc import Callable

import numpy as np

from inlay.base import extras
from inlay.base.errors import InvalidRequestError
from inlay.media.audio import (
    MAX_CHANNELS,
    MAX_RATE,
    MAX_SECONDS,
    MIN_RATE,
    behind_tags,
    container_of,
)
from inlay.media.decoder import Decoder, can_decode
from inlay.media.sound_files import WAV_HEADER_BYTES, wav_header
from inlay.messages.prompt import Buffer

CPU_SECONDS = 20
"""Processor time of one sound; 600 s of AAC in two channels take 3 s, with what is done here."""

MEMORY_BYTES = 64 << 20
"""Memory of its decoder."""

_DEMUXERS = {"Ogg": "ogg", "WebM": "matroska", "MP4": "mov", "AAC": "aac"}
_HEAD = struct.Struct("<IBBI")
_MAX_BLOCK = 4 << 20
"""Bytes of samples that come at once; the largest frames, of FLAC, are of 2 MB."""
_PLANAR = 8
_SAMPLES = (
    (np.dtype("u1"), 128.0, 128.0), (np.dtype("<i2"), 0.0, 32768.0),
    (np.dtype("<i4"), 0.0, 2147483648.0), (np.dtype("<f4"), 0.0, 1.0),
    (np.dtype("<f8"), 0.0, 1.0),
)  # fmt: skip
"""Samples by their number in `decoder_process`: what they are, their zero and their largest."""


def unpacked(
    data: Buffer, hold: Callable[[int], None], *, max_seconds: float = MAX_SECONDS
) -> Buffer:
    """Return sound in a container as a WAV file: one channel, 16 bits, its own rate.

    What is in none is returned as it is. Work of seconds, which ends as `check_wanted` says.

    Args:
        data: the whole file.
        hold: reserves bytes as they come.
        max_seconds: longest that is allowed.

    Raises:
        InvalidRequestError: it cannot be decoded, or not here; it is too long.
        InlayError: `hold` refuses the bytes.
    """
    name = container_of(data.view)
    if name is None:
        return data
    if not can_decode():
        raise InvalidRequestError(
            f"audio is a file of {name}, which this server does not decode: it needs "
            f"`{extras.install('video')}`, on Linux; or send WAV, FLAC or MP3"
        )
    task = {
        "kind": "sound",
        "format": _DEMUXERS[name],
        "most": max_seconds,
        "memory": MEMORY_BYTES,
        "seconds": CPU_SECONDS,
    }
    with Decoder("audio", behind_tags(data.view), task) as decoder:
        return _read(decoder, hold, max_seconds)


def _read(decoder: Decoder, hold: Callable[[int], None], max_seconds: float) -> Buffer:
    file = bytearray(WAV_HEADER_BYTES)
    first = 0
    while True:
        kind = decoder.read(1)
        head = decoder.read(_HEAD.size) if kind == b"S" else b""
        if len(head) != _HEAD.size:
            raise decoder.failure(kind)
        rate, channels, form, count = _HEAD.unpack(head)
        if not count:
            break
        planar, number = divmod(form, _PLANAR)
        sample, zero, largest = _SAMPLES[min(number, len(_SAMPLES) - 1)]
        size = count * channels * sample.itemsize
        # The process is trusted by nobody.
        if not MIN_RATE <= rate <= MAX_RATE or not 1 <= channels <= MAX_CHANNELS:
            raise InvalidRequestError(f"audio has {channels} channels at {rate} Hz")
        if rate != (first := first or rate):
            raise InvalidRequestError(f"the rate of audio changes from {first} to {rate} Hz")
        if size > _MAX_BLOCK or len(file) + 2 * count > 2 * max_seconds * rate + _MAX_BLOCK:
            raise InvalidRequestError(f"audio is too long; allowed: {max_seconds:g} s")
        hold(2 * count)
        block = decoder.read(size)
        if len(block) != size:
            raise decoder.failure(b"")
        samples = np.frombuffer(block, sample)
        shape, axis = ((channels, count), 0) if planar else ((count, channels), 1)
        mixed = samples.reshape(shape).mean(axis)
        scaled = np.nan_to_num((mixed - zero) * (32767.0 / largest))
        file += scaled.clip(-32767, 32767).round().astype("<i2").tobytes()
    file[:WAV_HEADER_BYTES] = wav_header(first or MIN_RATE, len(file) - WAV_HEADER_BYTES)
    return Buffer(file)
