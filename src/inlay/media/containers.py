"""Headers of MP4 and WebM: what a file of video says of itself, before a decoder sees it.

MP4 is read as ISO/IEC 14496-12 has it, fragmented too; WebM and Matroska as RFC 9559. Frames are
counted, never taken from a header alone: an MP4's tables must agree, a WebM's blocks are counted.
Only integers are read, of at most `_MAX_PARTS` boxes or elements, so the time is bounded.
"""

import struct
from collections.abc import Iterator
from functools import partial
from typing import NamedTuple

from inlay.base.errors import InvalidRequestError
from inlay.media.malformed import malformed, shown_tag, unpack

_malformed, _unpack = partial(malformed, "a video"), partial(unpack, "a video")

CODECS = ("h264", "hevc", "vp8", "vp9", "av1")
"""Codecs that are decoded, by FFmpeg's names."""

_MAX_FRAMES = 36_000
_MAX_PARTS = 4 * _MAX_FRAMES

_MP4_CODECS = {
    b"avc1": "h264", b"avc3": "h264", b"hvc1": "hevc", b"hev1": "hevc",
    b"vp08": "vp8", b"vp09": "vp9", b"av01": "av1",
}  # fmt: skip
_WEBM_CODECS = {
    b"V_MPEG4/ISO/AVC": "h264", b"V_MPEGH/ISO/HEVC": "hevc",
    b"V_VP8": "vp8", b"V_VP9": "vp9", b"V_AV1": "av1",
}  # fmt: skip
_ORIENTATIONS = {
    (-1, 0, 0, 1): 2, (-1, 0, 0, -1): 3, (1, 0, 0, -1): 4,
    (0, 1, 1, 0): 5, (0, 1, -1, 0): 6, (0, -1, -1, 0): 7, (0, -1, 1, 0): 8,
}  # fmt: skip
"""Exif's number of a track's matrix, by the signs of its first two lines."""


class Container(NamedTuple):
    """The video of a file.

    Attributes:
        format: "MP4" or "WEBM".
        codec: of `CODECS`.
        height: of a frame as it is decoded, in pixels.
        width: likewise.
        frames: of the whole file.
        fps: frames a second, on average.
        orientation: Exif's number of how frames are seen.
    """

    format: str
    codec: str
    height: int
    width: int
    frames: int
    fps: float
    orientation: int = 1


def read_container(view: memoryview) -> Container | None:
    """The video of a file of bytes; None if it is neither MP4 nor WebM.

    Raises:
        InvalidRequestError: truncated or contradictory, of another codec, without video, or with
            frames in another file.
    """
    if bytes(view[4:8]) == b"ftyp":
        return _Mp4().read(view)
    if bytes(view[:4]) == b"\x1a\x45\xdf\xa3":
        return _WebM().read(view)
    return None


class _Track(NamedTuple):
    """A video track of an MP4; `seconds` is in units of its time scale."""

    id: int
    codec: str
    height: int
    width: int
    frames: int
    duration: int
    scale: int
    orientation: int


class _Mp4:
    """Reads the boxes of one MP4."""

    def __init__(self) -> None:
        self._left = _MAX_PARTS

    def read(self, view: memoryview) -> Container:
        parts = list(self._boxes(view))
        moov = [body for kind, body in parts if kind == b"moov"]
        if len(moov) != 1:
            raise _malformed("MP4", f"it has {len(moov)} moov boxes; a file has one")
        track, defaults = None, dict[int, int]()
        for kind, body in self._boxes(moov[0]):
            if kind == b"trak":
                track = track or self._track(body, len(view))
            elif kind == b"mvex":
                for trex in self._all(body, b"trex"):
                    id_, duration = _unpack("MP4", ">4xI4xI", trex)
                    defaults[id_] = duration
        if track is None:
            raise InvalidRequestError("a video is an MP4 without a video track")
        frames, duration = track.frames, track.duration
        for fragment in (body for kind, body in parts if kind == b"moof"):
            for traf in self._all(fragment, b"traf"):
                more, longer = self._fragment(traf, track.id, defaults.get(track.id, 0))
                frames, duration = _counted(frames + more), duration + longer
        fps = _rate("MP4", frames, duration / track.scale)
        return Container(
            "MP4", track.codec, track.height, track.width, frames, fps, track.orientation
        )

    def _track(self, trak: memoryview, size: int) -> _Track | None:
        named = self._named(trak)
        media = self._named(_of(named, b"mdia"))
        if bytes(_of(media, b"hdlr")[8:12]) != b"vide":
            return None
        info = self._named(_of(media, b"minf"))
        self._check_references(_of(self._named(_of(info, b"dinf")), b"dref"))
        table = self._named(_of(info, b"stbl"))
        count, _, coding, height_width = _unpack("MP4", ">4xII4s24x4s", _of(table, b"stsd"))
        if count != 1:
            raise _malformed("MP4", f"its frames are of {count} kinds")
        width, height = struct.unpack(">HH", height_width)
        head = _of(named, b"tkhd")
        long = bytes(head[:1]) == b"\x01"
        (id_,) = _unpack("MP4", ">I", head, 20 if long else 12)
        a, b, c, d = _unpack("MP4", ">ii4xii", head, 52 if long else 40)
        turned = tuple((each > 0) - (each < 0) for each in (a, b, c, d))
        timing = _of(media, b"mdhd")
        (scale,) = _unpack("MP4", ">I", timing, 20 if bytes(timing[:1]) == b"\x01" else 12)
        frames, duration = _times(_of(table, b"stts"))
        _check_sizes(_of(table, b"stsz"), frames, size)
        if not scale:
            raise _malformed("MP4", "its time scale is 0")
        codec = _codec("MP4", coding, _MP4_CODECS)
        orientation = _ORIENTATIONS.get(turned, 1)
        return _Track(id_, codec, height, width, frames, duration, scale, orientation)

    def _check_references(self, dref: memoryview) -> None:
        for kind, body in self._boxes(dref[8:]):
            if kind != b"url " or not _unpack("MP4", ">I", body)[0] & 1:
                raise InvalidRequestError(
                    "the frames of a video are in another file, which is not opened"
                )

    def _fragment(self, traf: memoryview, track: int, default: int) -> tuple[int, int]:
        """Frames and their duration of a track in a fragment."""
        frames = duration = 0
        for kind, body in self._boxes(traf):
            if kind == b"tfhd":
                flags, id_ = _unpack("MP4", ">II", body)
                if id_ != track:
                    return 0, 0
                if flags & 0x8:
                    at = 8 + 8 * bool(flags & 0x1) + 4 * bool(flags & 0x2)
                    (default,) = _unpack("MP4", ">I", body, at)
            elif kind == b"trun":
                flags, count = _unpack("MP4", ">II", body)
                frames = _counted(frames + count)
                fields = (flags & 0xF00).bit_count()
                at = 8 + 4 * bool(flags & 0x1) + 4 * bool(flags & 0x4)
                values = _unpack("MP4", f">{count * fields}I", body, at)
                durations = flags & 0x100
                duration += sum(values[::fields]) if durations else count * default
        return frames, duration

    def _all(self, body: memoryview, kind: bytes) -> list[memoryview]:
        return [inner for found, inner in self._boxes(body) if found == kind]

    def _named(self, body: memoryview) -> dict[bytes, memoryview]:
        """The boxes in a box, the first of each kind."""
        found: dict[bytes, memoryview] = {}
        for kind, inner in self._boxes(body):
            found.setdefault(kind, inner)
        return found

    def _boxes(self, body: memoryview) -> Iterator[tuple[bytes, memoryview]]:
        while body:
            self._left -= 1
            if self._left < 0:
                raise _malformed("MP4", f"it has more than {_MAX_PARTS} boxes")
            size, kind = _unpack("MP4", ">I4s", body)
            head = 8
            if size == 1:
                (size,), head = _unpack("MP4", ">Q", body, 8), 16
            size = size or len(body)
            if not head <= size <= len(body):
                raise _malformed(
                    "MP4",
                    f"it is truncated, or its box {shown_tag(kind)} says {size} bytes where "
                    f"{len(body)} are",
                )
            yield kind, body[head:size]
            body = body[size:]


def _of(boxes: dict[bytes, memoryview], kind: bytes) -> memoryview:
    if kind not in boxes:
        raise _malformed("MP4", f"its track has no box {shown_tag(kind)}")
    return boxes[kind]


def _times(stts: memoryview) -> tuple[int, int]:
    """Number of frames and their duration."""
    (entries,) = _unpack("MP4", ">4xI", stts)
    values = _unpack("MP4", f">{2 * _counted(entries)}I", stts, 8)
    counts, lengths = values[::2], values[1::2]
    frames = _counted(sum(counts))
    return frames, sum(count * length for count, length in zip(counts, lengths, strict=True))


def _check_sizes(stsz: memoryview, frames: int, size: int) -> None:
    each, count = _unpack("MP4", ">4xII", stsz)
    if count != frames:
        raise _malformed("MP4", f"its tables name {frames} and {count} frames")
    total = each * count or sum(_unpack("MP4", f">{count}I", stsz, 12))
    if total > size:
        raise _malformed("MP4", f"its frames take {total} bytes of {size}")


_EBML, _SEGMENT, _TRACK, _CLUSTER = 0x1A45DFA3, 0x18538067, 0xAE, 0x1F43B675
_MASTERS = {_EBML, _SEGMENT, 0x1549A966, 0x1654AE6B, _TRACK, 0xE0, _CLUSTER, 0xA0}
"""Elements that hold those which are read: the header, a segment, its facts, its tracks, a track,
its video, a cluster, a group of a block."""

_SCALE, _NUMBER, _TYPE, _CODEC, _WIDTH, _HEIGHT, _ENCODED, _TIME = (
    0x2AD7B1, 0xD7, 0x83, 0x86, 0xB0, 0xBA, 0x6D80, 0xE7,
)  # fmt: skip
_BLOCKS = (0xA3, 0xA1)


class _WebM:
    """Reads the elements of one WebM in the order they come.

    Those that hold others are entered and never left: an unknown size, as recorders write it, and
    nesting then cost nothing.
    """

    def __init__(self) -> None:
        self._tracks: list[dict[int, memoryview]] = []
        self._once: set[int] = set()
        self._frames = self._cluster = 0
        self._first = self._last = 0
        self._scale = 1_000_000

    def read(self, view: memoryview) -> Container:
        at = 0
        for _ in range(_MAX_PARTS):
            if at >= len(view):
                break
            kind, at = _number(view, at, marked=True)
            size, at = _number(view, at)
            if kind in _MASTERS:
                self._enter(kind)
                continue
            if size > len(view) - at:
                raise _malformed(
                    "WEBM",
                    f"it is truncated, or an element says {size} bytes where {len(view) - at} are",
                )
            self._see(kind, view[at : at + size])
            at += size
        else:
            raise _malformed("WEBM", f"it has more than {_MAX_PARTS} elements")
        track = self._video()
        codec = _codec("WEBM", bytes(track.get(_CODEC, b"")).rstrip(b"\0"), _WEBM_CODECS)
        frames, seconds = self._frames, (self._last - self._first) * self._scale / 1e9
        if frames > 1:  # the last one's time is not said
            seconds *= frames / (frames - 1)
        fps = _rate("WEBM", frames, seconds if frames != 1 else 1.0)
        height, width = (_integer(track.get(each)) for each in (_HEIGHT, _WIDTH))
        return Container("WEBM", codec, height, width, frames, fps)

    def _enter(self, kind: int) -> None:
        if kind in (_EBML, _SEGMENT):
            if kind in self._once:
                raise _malformed("WEBM", "it has two segments; send one file")
            self._once.add(kind)
        elif kind == _TRACK:
            self._tracks.append({})

    def _see(self, kind: int, body: memoryview) -> None:
        if kind in _BLOCKS:
            self._block(body)
        elif kind == _TIME:
            self._cluster = _integer(body)
        elif kind == _SCALE:
            self._scale = _integer(body)
        elif self._tracks:
            self._tracks[-1].setdefault(kind, body)

    def _video(self) -> dict[int, memoryview]:
        for track in self._tracks:
            if _integer(track.get(_TYPE)) == 1:
                return track
        raise InvalidRequestError("a video is a WEBM without a video track")

    def _block(self, body: memoryview) -> None:
        track = self._video()
        number, at = _number(body, 0)
        if number != _integer(track.get(_NUMBER)):
            return
        if _ENCODED in track:
            raise InvalidRequestError("the frames of a video (WEBM) are compressed or encrypted")
        offset, flags = _unpack("WEBM", ">hB", body, at)
        if flags & 6:
            raise _malformed("WEBM", "several frames share a block")
        frame = body[at + 3 : at + 4]
        if bytes(track.get(_CODEC, b"")) == b"V_VP8" and frame and not frame[0] & 0x10:
            return  # it is for prediction alone, never shown
        time = self._cluster + offset
        self._first = min(self._first, time) if self._frames else time
        self._last = max(self._last, time)
        self._frames = _counted(self._frames + 1)


def _number(view: memoryview, at: int, *, marked: bool = False) -> tuple[int, int]:
    """A number of variable length (RFC 8794), and where it ends; with its marker for an id."""
    first = view[at] if at < len(view) else 0
    length = 9 - first.bit_length()
    if length > (4 if marked else 8) or at + length > len(view):
        raise _malformed("WEBM", f"it is truncated, or holds no element at byte {at}")
    value = int.from_bytes(view[at : at + length], "big")
    return value if marked else value & ~(1 << 7 * length), at + length


def _integer(body: memoryview | None) -> int:
    if body is None or len(body) > 8:
        raise _malformed("WEBM", "it lacks a number of its track")
    return int.from_bytes(body, "big")


def _codec(format_: str, name: bytes, known: dict[bytes, str]) -> str:
    if name not in known:
        raise InvalidRequestError(
            f"a video ({format_}) has frames of codec {shown_tag(name[:40])}; read are "
            f"{', '.join(CODECS)}"
        )
    return known[name]


def _counted(frames: int) -> int:
    if frames > _MAX_FRAMES:
        raise InvalidRequestError(f"a video has {frames} frames; allowed: {_MAX_FRAMES}")
    return frames


def _rate(format_: str, frames: int, seconds: float) -> float:
    if not frames:
        raise InvalidRequestError(f"a video ({format_}) has no frames")
    if not seconds:
        raise _malformed(format_, "its frames take no time")
    return frames / seconds
