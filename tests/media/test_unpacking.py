"""Sound in containers: what comes out of them, and what does not."""

import io
import platform
import threading
from collections.abc import Callable
from contextlib import suppress
from fractions import Fraction
from functools import cache
from pathlib import Path

import av
import numpy as np
import numpy.typing as npt
import pytest
import soundfile

from inlay.base.errors import InvalidRequestError, OverloadedError
from inlay.base.pace import Unwanted, while_wanted
from inlay.media import decoder
from inlay.media.audio import container_of, read_audio_header
from inlay.media.sounds import decode_sound
from inlay.media.unpacking import unpacked
from inlay.messages.prompt import Buffer
from tests.media.clips import drawn, video

SECONDS = 1.5

KINDS = {
    "Ogg Opus": ("ogg", "libopus", 48000, "Ogg"),
    "Ogg Vorbis": ("ogg", "vorbis", 44100, "Ogg"),
    "Ogg FLAC": ("ogg", "flac", 44100, "Ogg"),
    "WebM Opus": ("webm", "libopus", 48000, "WebM"),
    "WebM Vorbis": ("webm", "vorbis", 44100, "WebM"),
    "Matroska AAC": ("matroska", "aac", 44100, "WebM"),
    "M4A AAC": ("ipod", "aac", 44100, "MP4"),
    "MP4 AAC": ("mp4", "aac", 16000, "MP4"),
    "M4A ALAC": ("ipod", "alac", 44100, "MP4"),
    "AAC": ("adts", "aac", 44100, "AAC"),
}


def tone(rate: int, seconds: float = SECONDS) -> npt.NDArray[np.float64]:
    """A tone that rises from step to step, silent at both ends."""
    at = np.arange(int(rate * seconds)) / rate
    steps = np.floor(at * 8)
    loud = np.sin(np.pi * at / seconds)
    return np.asarray(0.5 * loud * np.sin(2 * np.pi * (200 + 60 * steps) * at))


@cache
def recorded(kind: str, codec: str, rate: int, layout: str = "stereo") -> bytes:
    """A file as FFmpeg makes it, the same sound on all channels; Vorbis as libsndfile does."""
    if codec == "vorbis":
        return vorbis(kind, rate, layout)
    out = io.BytesIO()
    whole = np.round(tone(rate) * 32767).astype(np.int16)
    with av.open(out, "w", format=kind) as container:
        stream = container.add_stream(codec, rate=rate, layout=layout)
        assert isinstance(stream, av.AudioStream)
        channels = len(stream.layout.channels)
        frame = av.AudioFrame.from_ndarray(
            np.repeat(whole, channels)[None], format="s16", layout=layout
        )
        frame.sample_rate, frame.pts, frame.time_base = rate, 0, Fraction(1, rate)
        for packet in (*stream.encode(frame), *stream.encode(None)):
            container.mux(packet)
    return out.getvalue()


def vorbis(kind: str, rate: int, layout: str) -> bytes:
    ogg, out = io.BytesIO(), io.BytesIO()
    channels = {"mono": 1, "stereo": 2, "5.1": 6}[layout]
    samples = np.repeat(tone(rate)[:, None], channels, axis=1)
    soundfile.write(ogg, samples, rate, format="OGG", subtype="VORBIS")
    if kind == "ogg":
        return ogg.getvalue()
    ogg.seek(0)
    with av.open(ogg, "r") as source, av.open(out, "w", format=kind) as container:
        stream = container.add_stream_from_template(source.streams.audio[0])
        for packet in source.demux(source.streams.audio[0]):
            if packet.dts is not None:
                packet.stream = stream
                container.mux(packet)
    return out.getvalue()


def opened(data: bytes, **more: float) -> tuple[npt.NDArray[np.float64], int]:
    file = unpacked(Buffer(data), lambda _: None, **more)
    samples, rate = soundfile.read(io.BytesIO(file.view))
    return np.asarray(samples), rate


@pytest.mark.parametrize("name", KINDS)
def test_the_sound_of_each_container_is_heard_as_it_was(name: str) -> None:
    kind, codec, rate, container = KINDS[name]
    data = recorded(kind, codec, rate)
    assert container_of(memoryview(data)) == container
    found, told = opened(data)
    assert told == rate
    assert found.ndim == 1
    wanted = tone(rate)
    # A coder may add silence, and AAC without a container does not say how much.
    assert abs(len(found) - len(wanted)) <= 3 * 1024
    shifts = range(0, 3 * 1024, 1) if container == "AAC" else range(2)
    length = min(len(found), len(wanted)) - 3 * 1024
    least = min(np.abs(found[at : at + length] - wanted[:length]).mean() for at in shifts)
    assert least < 0.02


def test_a_file_that_is_in_no_container_stays_as_it_is() -> None:
    data = Buffer(b"RIFF....WAVE")
    assert unpacked(data, lambda _: None) is data
    assert container_of(memoryview(b"\xff\xfb\x90\x00")) is None
    assert container_of(memoryview(b"")) is None


def test_what_comes_out_is_read_and_decoded_like_any_wav() -> None:
    file = unpacked(Buffer(recorded("webm", "libopus", 48000)), lambda _: None)
    header = read_audio_header(file.view)
    assert (header.format, header.rate, header.channels) == ("WAV", 48000, 1)
    assert abs(header.seconds - SECONDS) < 0.03
    assert len(decode_sound(file.view, header, 16000)) == header.samples_at(16000)


@pytest.mark.parametrize(("codec", "kind"), [("libx264", "mp4"), ("libvpx", "webm")])
def test_the_sound_of_a_video_is_heard_alone(codec: str, kind: str) -> None:
    found, _ = opened(video(drawn(12), codec, "yuv420p", kind=kind, sound=True))
    assert len(found)


def test_sound_behind_a_tag_is_heard() -> None:
    tag = b"ID3\x04\x00\x00\x00\x00\x00\x05title"
    found, rate = opened(tag + recorded("adts", "aac", 44100))
    assert (rate, len(found)) == (44100, len(opened(recorded("adts", "aac", 44100))[0]))


def test_channels_are_mixed_to_their_mean() -> None:
    one, six = (
        opened(recorded("matroska", "flac", 44100, layout))[0] for layout in ("mono", "5.1")
    )
    assert len(one) == len(six) == len(tone(44100))
    assert np.abs(one - six).max() <= 2 / 32767
    assert np.abs(one - tone(44100)).max() <= 2 / 32767


def test_bytes_are_held_as_they_come_and_a_refusal_ends_it() -> None:
    data = Buffer(recorded("ogg", "libopus", 48000))
    held: list[int] = []
    file = unpacked(data, held.append)
    assert sum(held) == len(file) - 44
    assert len(held) > 10

    def refuse(_: int) -> None:
        raise OverloadedError("no room", retry_after=1)

    before = children()
    with pytest.raises(OverloadedError, match="no room"):
        unpacked(data, refuse)
    assert children() == before


def children() -> list[str]:
    return Path("/proc/thread-self/children").read_text(encoding="ascii").split()


def test_sound_that_is_too_long_is_not_decoded_to_its_end() -> None:
    data = recorded("ogg", "libopus", 48000)
    held: list[int] = []
    with pytest.raises(InvalidRequestError, match=r"longer than 0\.5 s"):
        unpacked(Buffer(data), held.append, max_seconds=0.5)
    assert sum(held) <= 48000


def packets(data: bytes) -> list[int]:
    """Places of a file where pages of Ogg begin."""
    places, at = [], data.find(b"OggS")
    while at >= 0:
        places.append(at)
        at = data.find(b"OggS", at + 1)
    return places


def no_sound() -> bytes:
    out = io.BytesIO()
    with av.open(out, "w", format="mp4") as container:
        stream = container.add_stream("mpeg4", rate=5)
        stream.width = stream.height = 16
        stream.pix_fmt = "yuv420p"
        for packet in (*stream.encode(av.VideoFrame(16, 16, "yuv420p")), *stream.encode(None)):
            container.mux(packet)
    return out.getvalue()


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "an MP4 that is cut": (lambda: recorded("mp4", "aac", 16000)[:-6000], "cannot be decoded"),
    "no sound": (no_sound, "no sound that FFmpeg finds"),
    "a codec that is not read": (
        lambda: recorded("matroska", "ac3", 48000),
        "codec ac3; read are aac, alac, flac, mp3, opus, vorbis",
    ),
    "nothing behind its magic": (lambda: b"OggS" + bytes(60), "cannot be decoded"),
    "noise": (lambda: b"\x1aE\xdf\xa3" + np.random.default_rng(0).bytes(9000), "cannot be decoded"),
    "headers alone": (
        lambda: (data := recorded("ogg", "vorbis", 44100))[: packets(data)[2]],
        "cannot be decoded",
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_what_cannot_be_decoded_is_an_error(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(InvalidRequestError, match=message):
        opened(data())


def test_files_with_any_byte_changed_are_sound_or_an_error() -> None:
    random = np.random.default_rng(2)
    for kind, codec, rate, _ in (KINDS["WebM Opus"], KINDS["M4A AAC"], KINDS["Ogg Vorbis"]):
        data = bytearray(recorded(kind, codec, rate))
        for place in random.integers(0, len(data), 40):
            data[place] = random.integers(0, 256)
        data[:8] = recorded(kind, codec, rate)[:8]
        with suppress(InvalidRequestError):
            samples, _ = opened(bytes(data))
            assert np.isfinite(samples).all()


ALIKE = {
    "another rate": "piece(1, 48000); piece(1, 44100)",
    "a rate of none": "piece(1, 7)",
    "no channels": "piece(0, 48000)",
    "a piece of gigabytes": "piece(1, 48000, 1 << 30)",
    "half a piece": "os.write(1, struct.pack('<cIBBI', b'S', 48000, 1, 1, 100) + bytes(9))",
    "half a head": "os.write(1, b'S1')",
    "a loop": "os.kill(os.getpid(), signal.SIGXCPU)",
}


@pytest.mark.parametrize("name", ALIKE)
def test_a_decoder_that_was_taken_over_is_not_believed(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text(
        "import os, signal, struct\n"
        "def piece(channels, rate, count=10):\n"
        "    head = struct.pack('<cIBBI', b'S', rate, channels, 1, count)\n"
        "    os.write(1, head + bytes(2 * channels * min(count, 10)))\n" + ALIKE[name],
        encoding="utf-8",
    )
    monkeypatch.setattr(decoder, "_PROGRAM", program)
    with pytest.raises(
        InvalidRequestError, match=r"channels at|changes from|too long|ended with|than 20 s"
    ):
        opened(recorded("ogg", "libopus", 48000))


def test_a_client_that_leaves_ends_the_decoder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    program = tmp_path / "program.py"
    program.write_text("import time; time.sleep(3600)", encoding="utf-8")
    monkeypatch.setattr(decoder, "_PROGRAM", program)
    left, before = threading.Event(), children()
    threading.Timer(0.3, left.set).start()
    with pytest.raises(Unwanted):
        while_wanted(left, opened, recorded("ogg", "libopus", 48000))
    assert children() == before


def test_without_pyav_the_error_names_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    message = r"a file of Ogg, .*`pip install 'inlay-server\[video\]'`.* or send WAV, FLAC or MP3"
    with pytest.raises(InvalidRequestError, match=message):
        opened(recorded("ogg", "libopus", 48000))
