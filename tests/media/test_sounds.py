"""Sound from files: samples as they were recorded, resampled, within what the header told."""

import io
import struct
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from inlay.base.errors import InvalidRequestError
from inlay.media.audio import read_audio_header
from inlay.media.sounds import decode_sound, resampled
from tests.media.test_audio import EXACT, wav


def tone(hertz: float, rate: int, seconds: float = 0.5) -> npt.NDArray[np.float32]:
    return np.sin(2 * np.pi * hertz * np.arange(int(rate * seconds)) / rate).astype(np.float32)


def decoded(data: bytes, rate: int = 16000) -> npt.NDArray[np.float32]:
    return decode_sound(memoryview(data), read_audio_header(data), rate)


def recorded(sound: npt.NDArray[Any], rate: int, kind: str, subtype: str) -> bytes:
    file = io.BytesIO()
    soundfile.write(file, sound, rate, format=kind, subtype=subtype)
    return file.getvalue()


@pytest.mark.parametrize(("kind", "subtype"), [*EXACT, ("MP3", "MPEG_LAYER_III")])
def test_a_file_of_every_kind_is_the_mean_of_its_channels(kind: str, subtype: str) -> None:
    left, right = tone(440, 16000), 0.5 * tone(700, 16000)
    data = recorded(0.5 * np.stack([left, right], axis=1), 16000, kind, subtype)
    found = decoded(data)
    wanted = (left + right) / 4
    assert len(found) == read_audio_header(data).samples
    if kind == "MP3":
        return
    step = {"PCM_U8": 2**-7, "ULAW": 2**-5, "ALAW": 2**-5}.get(subtype, 2**-14)
    assert np.abs(found - wanted).max() < step


@pytest.mark.parametrize("old", [1000, 8000, 11025, 22050, 44100, 48000, 96001, 384_000])
def test_a_resampled_tone_is_the_tone_at_the_new_rate(old: int) -> None:
    hertz = 0.3 * min(old, 16000)
    found = resampled(tone(hertz, old, 1), old, 16000)
    assert len(found) == 16000
    edge = 2000
    assert np.abs(found - tone(hertz, 16000, 1))[edge:-edge].max() < 1e-5
    again = resampled(tone(hertz, old, 1), old, 16000)
    assert found.tobytes() == again.tobytes()


@pytest.mark.parametrize("old", [22050, 44100, 48000])
def test_what_the_new_rate_cannot_hold_is_left_out(old: int) -> None:
    found = resampled(tone(9500, old, 1), old, 16000)
    assert np.abs(found[2000:-2000]).max() < 1e-3


@pytest.mark.parametrize("length", [1, 2, 3, 160, 441, 44101])
def test_a_sound_of_any_length_has_the_samples_its_header_promises(length: int) -> None:
    for rate in (8000, 44100, 48000):
        data = recorded(tone(50, rate, 2)[:length], rate, "WAV", "PCM_16")
        header = read_audio_header(data)
        assert len(decoded(data)) == header.samples_at(16000)


def flac(claimed: int) -> bytes:
    """A FLAC of 8,000 samples that says it has `claimed`."""
    data = bytearray(recorded(tone(100, 16000), 16000, "FLAC", "PCM_16"))
    (packed,) = struct.unpack_from(">Q", data, 18)
    struct.pack_into(">Q", data, 18, packed >> 36 << 36 | claimed)
    return bytes(data)


def test_a_file_that_holds_less_than_it_says_is_refused_and_more_is_cut() -> None:
    with pytest.raises(
        InvalidRequestError, match=r"cannot be decoded|says it has 9000 samples and holds"
    ):
        decoded(flac(9000))
    assert len(decoded(flac(50))) == 50


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_samples_that_are_not_finite_are_refused(value: float) -> None:
    data = wav(kind=3, bits=32, data=struct.pack("<4f", 0.1, value, 0.2, 0.3))
    with pytest.raises(InvalidRequestError, match="not finite"):
        decoded(data)


def test_a_damaged_file_is_refused() -> None:
    data = bytearray(flac(8000))
    data[60:] = bytes(len(data) - 60)
    with pytest.raises(InvalidRequestError, match=r"cannot be decoded|holds"):
        decoded(bytes(data))


def test_many_channels_are_read_a_block_at_a_time() -> None:
    data = wav(channels=32, data=b"\x00\x20" * 32 * 70_000)
    found = decoded(data)
    assert found.shape == (70_000,)
    assert (found == 0.25).all()
