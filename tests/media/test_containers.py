"""Headers of MP4 and WebM: as FFmpeg has them, and what is refused."""

import io
import random
import struct
from collections.abc import Callable
from fractions import Fraction
from functools import cache
from typing import Any

import av
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from inlay.base.errors import InvalidRequestError
from inlay.media.containers import Container, read_container
from inlay.media.frames import VideoHeader, read_video_header
from tests.media.clips import drawn, video

FRAMES = drawn(9)
QUICK: dict[str, str] = {"preset": "ultrafast"}
FRAGMENTED = {"movflags": "frag_keyframe+empty_moov"}
FILES: dict[str, tuple[Callable[[], bytes], str]] = {
    "h264": (lambda: video(FRAMES), "h264"),
    "frames out of order": (
        lambda: video(FRAMES, "libx264", "yuv420p", options={"bf": "3"}), "h264"
    ),
    "hevc": (
        lambda: video(
            FRAMES, "libx265", "yuv420p", options=QUICK | {"x265-params": "log-level=none"}
        ),
        "hevc",
    ),
    "av1": (lambda: video(FRAMES, "libsvtav1", "yuv420p", options={"preset": "12"}), "av1"),
    "vp9 in MP4": (lambda: video(FRAMES, "libvpx-vp9", "yuv420p", options={}), "vp9"),
    "QuickTime": (lambda: video(FRAMES, kind="mov"), "h264"),
    "fragments": (lambda: video(FRAMES, container=FRAGMENTED), "h264"),
    "many fragments": (
        lambda: video(FRAMES, container={"movflags": "frag_every_frame+empty_moov"}), "h264"
    ),
    "sound before": (lambda: video(FRAMES, sound=True), "h264"),
    "29.97 a second": (lambda: video(FRAMES, fps=Fraction(30000, 1001)), "h264"),
    "odd sizes": (lambda: video(drawn(4, 47, 63)), "h264"),
    "one frame": (lambda: video(FRAMES[:1]), "h264"),
    "unlike times": (lambda: video(FRAMES[:5], times=[0, 40, 80, 500, 2000]), "h264"),
    "vp8": (lambda: video(FRAMES, "libvpx", "yuv420p", kind="webm", options={}), "vp8"),
    "vp9": (lambda: video(FRAMES, "libvpx-vp9", "yuv420p", kind="webm", options={}), "vp9"),
    "Matroska": (lambda: video(FRAMES, kind="matroska"), "h264"),
    "WebM as it is recorded": (
        lambda: video(
            FRAMES, "libvpx", "yuv420p", kind="webm", options={}, container={"live": "1"}
        ),
        "vp8",
    ),
    "WebM with sound": (
        lambda: video(FRAMES, "libvpx", "yuv420p", kind="webm", options={}, sound=True), "vp8"
    ),
}  # fmt: skip


@cache
def file(name: str) -> bytes:
    return FILES[name][0]()


def header(data: bytes) -> Container:
    found = read_container(memoryview(data))
    assert found is not None
    return found


@pytest.mark.parametrize("name", FILES)
def test_a_header_is_what_ffmpeg_says(name: str) -> None:
    found = header(file(name))
    with av.open(io.BytesIO(file(name)), "r") as opened:
        stream = opened.streams.video[0]
        assert found.codec == FILES[name][1] == stream.codec_context.codec.canonical_name
        assert (found.width, found.height) == (stream.width, stream.height)
        if found.format == "MP4" and "fragments" not in name:
            assert found.frames == stream.frames
            assert found.fps == pytest.approx(float(stream.average_rate or 0), rel=1e-9)
        elif found.frames > 1:
            assert found.fps == pytest.approx(25)
        assert found.frames == len(list(opened.decode(stream)))
    assert found.orientation == 1


def box(data: bytes, kind: bytes) -> int:
    """The place after a box's kind."""
    return data.index(kind, data.index(b"moov")) + 4


def changed(data: bytes, kind: bytes, at: int, *values: int, layout: str = "I") -> bytes:
    """An MP4 with numbers of a box in place of its own."""
    place = box(data, kind) + at
    new = struct.pack(f">{len(values)}{layout}", *values)
    return data[:place] + new + data[place + len(new) :]


ONE, TURNED = 1 << 16, (-1) % (1 << 32)


@pytest.mark.parametrize(
    ("matrix", "orientation"),
    [
        ((1, 0, 0, 0, 1), 1), ((-1, 0, 0, 0, 1), 2), ((-1, 0, 0, 0, -1), 3), ((1, 0, 0, 0, -1), 4),
        ((0, 1, 0, 1, 0), 5), ((0, 1, 0, -1, 0), 6), ((0, -1, 0, -1, 0), 7), ((0, -1, 0, 1, 0), 8),
        ((1, 1, 0, 1, 1), 1),
    ],
)  # fmt: skip
def test_a_track_is_turned_as_its_matrix_says(matrix: tuple[int, ...], orientation: int) -> None:
    data = changed(file("h264"), b"tkhd", 40, *(each * ONE % (1 << 32) for each in matrix))
    assert header(data).orientation == orientation
    seen = read_video_header(data, max_frames=8, max_pixels=1 << 20, containers=True)
    assert (seen.height, seen.width) == ((48, 64) if orientation < 5 else (64, 48))


def without(data: bytes, kind: bytes) -> bytes:
    """An MP4 with a box of another kind in place of one."""
    return data.replace(kind, b"free")


def references(kind: bytes, flags: int) -> bytes:
    data = file("h264")
    place = box(data, b"dref") + 12  # version, count, size of the first
    return data[:place] + kind + struct.pack(">I", flags) + data[place + 8 :]


def element(number: int, body: bytes) -> bytes:
    size = (number.bit_length() + 7) // 8
    return number.to_bytes(size, "big") + struct.pack(">BI", 8, len(body)) + body


def webm(*blocks: bytes, codec: bytes = b"V_VP8", more: bytes = b"", kind: int = 1) -> bytes:
    """A WebM of the parts that are read, with `blocks` at times of 100 ms."""
    track = element(0xD7, b"\1") + element(0x83, bytes([kind])) + element(0x86, codec)
    track += element(0xE0, element(0xB0, b"\x40") + element(0xBA, b"\x30")) + more
    clusters = [
        element(0x1F43B675, element(0xE7, struct.pack(">H", 100 * index)) + element(0xA3, block))
        for index, block in enumerate(blocks)
    ]
    segment = element(0x1654AE6B, element(0xAE, track)) + b"".join(clusters)
    return element(0x1A45DFA3, element(0x4282, b"webm")) + element(0x18538067, segment)


SHOWN, HIDDEN = b"\x81\0\0\x80\x10\0\0", b"\x81\0\0\x80\x00\0\0"


def test_frames_of_vp8_that_are_never_shown_are_not_counted() -> None:
    assert header(webm(SHOWN, SHOWN, HIDDEN, SHOWN)).frames == 3
    assert header(webm(SHOWN, SHOWN, HIDDEN, SHOWN, codec=b"V_VP9")).frames == 4


FTYP = b"\0\0\0\x10ftypisom\0\0\0\0"
DEEP = b"".join(struct.pack(">I4s", 8 * left, b"moov") for left in range(4000, 0, -1))
BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "nothing else": (lambda: FTYP, "0 moov boxes"),
    "cut at its end": (lambda: file("h264")[:-1], "truncated"),
    "cut in the frames": (lambda: file("h264")[:2000], "truncated"),
    "cut in the header": (lambda: FTYP[:14] + b"moov", "truncated"),
    "WebM cut": (lambda: file("vp8")[:-1], "truncated"),
    "WebM of a header alone": (lambda: b"\x1a\x45\xdf\xa3", "truncated"),
    "WebM of noise": (lambda: b"\x1a\x45\xdf\xa3\x80" + bytes(90), "truncated"),
    "no moov": (lambda: without(file("h264"), b"moov"), "0 moov boxes"),
    "two files": (lambda: file("h264") * 2, "2 moov boxes"),
    "two WebMs": (lambda: file("vp8") * 2, "two segments"),
    "no frames": (
        lambda: changed(changed(file("h264"), b"stts", 4, 0), b"stsz", 8, 0), "has no frames"
    ),
    "more frames": (lambda: changed(file("h264"), b"stsz", 8, 2**32 - 1), "name 9 and 4294967295"),
    "more frames twice": (
        lambda: changed(changed(file("h264"), b"stts", 8, 2**31), b"stsz", 8, 2**31),
        "2147483648 frames; allowed: 36000",
    ),
    "entries": (lambda: changed(file("h264"), b"stts", 4, 2**32 - 1), "allowed: 36000"),
    "frames of much": (lambda: changed(file("h264"), b"stsz", 4, 2**20, 9), "take 9437184 bytes"),
    "frames of no time": (lambda: changed(file("h264"), b"stts", 8, 9, 0), "take no time"),
    "no time scale": (lambda: changed(file("h264"), b"mdhd", 12, 0), "time scale is 0"),
    "no table": (lambda: without(file("h264"), b"stsz"), "has no box 'stsz'"),
    "two kinds of frames": (lambda: changed(file("h264"), b"stsd", 4, 2), "of 2 kinds"),
    "16k": (
        lambda: changed(file("h264"), b"avc1", 24, 16384, 16384, layout="H"),
        "16384 x 16384 pixels; allowed: 1 to 262144",
    ),
    "no size": (lambda: changed(file("h264"), b"avc1", 24, 0, 0, layout="H"), "0 x 0 pixels"),
    "ten hours": (
        lambda: changed(changed(file("h264"), b"mdhd", 12, 1), b"stts", 8, 9, 4000),
        "0.00025 frames a second",
    ),
    "a thousand a second": (
        lambda: changed(file("h264"), b"stts", 8, 9, 1), "12800 frames a second"
    ),
    "another file": (lambda: references(b"url ", 0), "in another file, which is not opened"),
    "an alias": (lambda: references(b"alis", 1), "in another file, which is not opened"),
    "another codec": (
        lambda: video(FRAMES, "mpeg4", "yuv420p", options={}), "codec 'mp4v'; read are h264"
    ),
    "encrypted": (lambda: file("h264").replace(b"avc1", b"encv"), "codec 'encv'"),
    "sound alone": (
        lambda: file("sound before").replace(b"vide", b"soun"), "without a video track"
    ),
    "sound alone in WebM": (lambda: webm(SHOWN, kind=2), "without a video track"),
    "nothing in WebM": (lambda: webm(), "has no frames"),
    "another codec in WebM": (lambda: webm(SHOWN, codec=b"V_THEORA"), "codec 'V_THEORA'"),
    "compressed in WebM": (
        lambda: webm(SHOWN, more=element(0x6D80, b"")), "compressed or encrypted"
    ),
    "frames that share a block": (lambda: webm(b"\x81\0\0\x82\1\2\3"), "share a block"),
    "frames at one time": (
        lambda: webm(SHOWN) + element(0xA3, SHOWN) , "take no time"
    ),
    "deep": (lambda: FTYP + DEEP, "has no box|without a video track|truncated"),
    "many boxes": (lambda: FTYP + struct.pack(">I4s", 8, b"free") * 150_000, "144000 boxes"),
    "many elements": (lambda: webm() + b"\xec\x80" * 150_000, "144000 elements"),
    "many frames": (lambda: webm(SHOWN) + element(0xA3, SHOWN) * 36_000, "36001 frames"),
    "HEIC": (lambda: b"\0\0\0\x10ftypheic\0\0\0\0" + bytes(8), "MP4"),
}  # fmt: skip


@pytest.mark.parametrize("name", BAD)
def test_a_bad_file_is_refused_from_its_header(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(InvalidRequestError, match=message):
        read_video_header(data(), max_frames=64, max_pixels=1 << 20, containers=True)


def test_other_files_are_left_to_others() -> None:
    for data in (b"", b"#EXTM3U\nhttp://127.0.0.1/a.ts\n", b"ffconcat version 1.0\nfile 'a'\n"):
        assert read_container(memoryview(data)) is None


def test_frames_that_take_too_long_together_are_refused() -> None:
    data = file("h264")
    limits: dict[str, Any] = {"max_frames": 64, "containers": True}
    assert read_video_header(data, max_pixels=4 * 48 * 64, **limits).indices[-1] == 8
    with pytest.raises(InvalidRequestError, match="64 x 48 pixels; allowed: 1 to 3071"):
        read_video_header(data, max_pixels=4 * 48 * 64 - 1, **limits)
    long = changed(changed(data, b"stts", 8, 30_000), b"stsz", 8, 30_000)
    long = changed(long, b"stsz", 4, 1)
    with pytest.raises(InvalidRequestError, match=r"30000 frames of 64 x 48 .* 52428800 pixels"):
        read_video_header(long, max_pixels=1 << 19, **limits)


def test_without_the_extra_the_answer_is_how_to_get_it() -> None:
    for name, kind in (("h264", "MP4"), ("vp8", "WEBM")):
        with pytest.raises(InvalidRequestError, match=rf"a file of {kind}; .*'[\w-]+\[video\]'"):
            read_video_header(file(name), max_frames=64, max_pixels=1 << 20)


def outcome(data: bytes) -> tuple[VideoHeader | None, str]:
    try:
        limits: dict[str, Any] = {"max_frames": 8, "max_pixels": 1 << 20}
        return read_video_header(data, containers=True, **limits), ""
    except InvalidRequestError as error:
        return None, error.message


SMALL = ["h264", "fragments", "many fragments", "sound before", "vp8", "WebM as it is recorded"]


@pytest.mark.parametrize("name", SMALL)
@settings(deadline=None, max_examples=150)
@given(st.data())
def test_a_damaged_file_is_a_header_within_bounds_or_an_error(name: str, data: Any) -> None:
    changing = random.Random(data.draw(st.integers(0, 2**32)))
    made = bytearray(file(name))
    # The frames are most of the bytes, and not what is read.
    heads = [at for kind in (b"moov", b"moof", b"\x16\x54\xae\x6b") if (at := made.find(kind)) > 0]
    for _ in range(changing.randint(1, 6)):
        first = changing.choice([0, *heads])
        at = min(first + changing.randint(0, 900), len(made) - 1)
        made[at] = changing.choice([0, 1, 8, 127, 128, 255, changing.randint(0, 255)])
    if changing.random() < 0.2:
        del made[changing.randint(0, len(made)) :]
    found, refusal = outcome(bytes(made))
    if found is None:
        assert refusal.isprintable()
        assert len(refusal) < 1000
        return
    assert 1 <= len(found.indices) <= 8
    assert found.indices[-1] < 36_000
    assert 1 <= found.height * found.width <= 1 << 18


@settings(deadline=None, max_examples=200)
@given(st.sampled_from([FTYP, b"\x1a\x45\xdf\xa3\x80"]), st.binary(max_size=400))
def test_noise_is_an_error(start: bytes, noise: bytes) -> None:
    with pytest.raises(InvalidRequestError):
        read_video_header(start + noise, max_frames=8, max_pixels=1 << 20, containers=True)
