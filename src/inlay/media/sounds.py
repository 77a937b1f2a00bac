"""Sound from files that strangers sent: decoded, mixed to one channel, resampled.

Files are decoded by libsndfile (the `soundfile` package), a block at a time, and never beyond the
length that their header told. Decoding and resampling end between blocks when nobody waits for them
(`check_wanted`).
"""

import math
from functools import cache
from io import BytesIO

import numpy as np
import numpy.typing as npt
import soundfile

from inlay.base.errors import InvalidRequestError, reason_of
from inlay.base.pace import check_wanted
from inlay.media.audio import AudioHeader, decodable

_BLOCK = 1 << 16
"""Samples of all channels that are decoded at a time."""

_MP3_SLACK = 2 * 1152
"""Samples that decoders of MP3 give more or less than its frames promise."""

_ZEROS = 32
"""Zero crossings of the resampling filter on each side."""

_CUTOFF = 0.95
"""Cutoff of the filter, as a share of the narrower band."""

_BETA = 9.0
"""Shape of the Kaiser window: sound far out of the band is 1e-5 of what it was."""

_STEPS = 1024
"""Points of the filter's table from one zero crossing to the next."""

Sound = npt.NDArray[np.float32]
"""Samples of one channel, from -1 to 1 in most files."""


def decode_sound(data: memoryview, header: AudioHeader, rate: int) -> Sound:
    """Decode a file as one channel, the mean of its own, at `rate` samples a second.

    Args:
        data: the file.
        header: of it; the result has `header.samples_at(rate)` samples.
        rate: of the result.

    Raises:
        InvalidRequestError: the file is damaged, is shorter than its header says, or has samples
            that are not finite.
    """
    found = np.zeros(header.samples, np.float32)
    at = 0
    try:
        with _opened(data, header) as file:
            if (file.samplerate, file.channels) != (header.rate, header.channels):
                raise InvalidRequestError(
                    f"audio has a header of {header.channels} channels at {header.rate} Hz and is "
                    f"{file.channels} channels at {file.samplerate} Hz"
                )
            while at < header.samples:
                check_wanted()
                most = max(1, min(_BLOCK // header.channels, header.samples - at))
                block = file.read(most, dtype="float32", always_2d=True)
                if not len(block):
                    break
                found[at : at + len(block)] = block.mean(axis=1, dtype=np.float64)
                at += len(block)
    except (soundfile.SoundFileError, OSError, ValueError, TypeError) as error:
        raise InvalidRequestError(f"audio cannot be decoded: {reason_of(error)}") from error
    if at < header.samples - (_MP3_SLACK if header.format == "MP3" else 0):
        raise InvalidRequestError(
            f"audio says it has {header.samples} samples and holds {at}: it is damaged or cut"
        )
    if not np.isfinite(found).all():
        raise InvalidRequestError("audio has samples that are not finite")
    return resampled(found, header.rate, rate)


def _opened(data: memoryview, header: AudioHeader) -> soundfile.SoundFile:
    try:
        return soundfile.SoundFile(BytesIO(decodable(data, header)))
    except soundfile.SoundFileError as error:
        # libsndfile's words are of a file of its system's, and of none that a client knows.
        raise InvalidRequestError(
            f"audio cannot be decoded: its decoder finds no {header.format} in it"
        ) from error


def resampled(sound: Sound, old: int, new: int) -> Sound:
    """Resample by a windowed sinc filter at each output's exact place.

    The same input gives the same output, bit for bit, on one machine.

    Args:
        sound: at `old` samples a second.
        old: samples a second.
        new: likewise, of the result.

    Returns:
        The samples at `new`, as many as `AudioHeader.samples_at` says.
    """
    if old == new:
        return sound
    step, phases = old // math.gcd(old, new), new // math.gcd(old, new)
    count = -(-len(sound) * new // old)
    # Cutoff in cycles of an input sample; half of the filter's length follows from it.
    cutoff = _CUTOFF * min(1.0, new / old)
    half = math.ceil(_ZEROS / cutoff)
    # Output k is at k * step / phases: every `phases` outputs begin a row of whole steps.
    rows = -(-count // phases)
    padded = np.zeros(half + (rows + 1) * step + 2 * half + 1, np.float32)
    padded[half : half + len(sound)] = sound
    taps = np.arange(-half + 1, half + 1)
    windows = np.lib.stride_tricks.sliding_window_view(padded, len(taps))
    found = np.empty((rows, phases), np.float32)
    places, table = _filter()
    for phase in range(min(phases, count)):
        check_wanted()
        first, rest = divmod(phase * step, phases)
        crossings = np.abs(taps - rest / phases) * (cutoff * _STEPS)
        weights = (cutoff * np.interp(crossings, places, table)).astype(np.float32)
        # The first tap stands at input `first - half + 1`.
        part = windows[first + 1 : first + 1 + rows * step : step][:rows]
        # Not `@`: OpenBLAS would start threads for sounds of some rates.
        np.einsum("rt,t->r", part, weights, out=found[:, phase])
    return np.ascontiguousarray(found.reshape(-1)[:count])


@cache
def _filter() -> tuple[npt.NDArray[np.float64], npt.NDArray[np.float64]]:
    """One half of the filter: places in steps, and values, 0 from the last zero crossing on."""
    places = np.arange(_ZEROS * _STEPS + 1, dtype=np.float64)
    window = np.i0(_BETA * np.sqrt(1 - (places / places[-1]) ** 2)) / np.i0(_BETA)
    return places, np.sinc(places / _STEPS) * window


_WINDOW_SECONDS = 0.025
_SEARCHED_SECONDS = 1.0


def quiet_cuts(sound: Sound, rate: int, most: int) -> list[tuple[int, int]]:
    """Return ranges of at most `most` samples, cut where it is quietest.

    A cut is in the middle of the quietest 25 ms of the last second (or the last half, of shorter
    ranges) before a range would be too long.

    Args:
        sound: samples of one channel.
        rate: samples a second.
        most: of a range; at least two windows.
    """
    window = max(1, int(rate * _WINDOW_SECONDS))
    searched = min(int(rate * _SEARCHED_SECONDS), most // 2)
    found: list[tuple[int, int]] = []
    start = 0
    while len(sound) - start > most:
        first = start + most - searched
        count = searched // window
        part = sound[first : first + count * window].reshape(count, window)
        quietest = int(np.argmin(np.square(part, dtype=np.float64).sum(axis=1)))
        stop = first + quietest * window + window // 2
        found.append((start, stop))
        start = stop
    return [*found, (start, len(sound))]
