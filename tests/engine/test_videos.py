"""Frames of MP4 and WebM from a confined process: what they are, and what it cannot do."""

import json
import os
import platform
import signal
import struct
import textwrap
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from inlay.base.errors import InvalidRequestError
from inlay.engine import videos
from inlay.engine.decoding import decoder_bytes
from inlay.engine.pictures import decode_frames
from inlay.media import decoder
from inlay.media.frames import VideoHeader, read_video_header
from tests.media.clips import drawn, video
from tests.media.test_containers import FRAGMENTED, ONE, SHOWN, changed, webm

FRAMES = drawn(12)
MP4 = video(FRAMES)


def header_of(data: bytes, most: int = 6) -> VideoHeader:
    return read_video_header(data, max_frames=most, max_pixels=1 << 24, containers=True)


def decoded(data: bytes, most: int = 6) -> list[npt.NDArray[np.uint8]]:
    found = decode_frames(memoryview(data), header_of(data, most))
    return [np.asarray(image) for image in found]


EXACT: dict[str, Callable[[], bytes]] = {
    "MP4": lambda: MP4,
    "QuickTime": lambda: video(FRAMES, kind="mov"),
    "fragments": lambda: video(FRAMES, container=FRAGMENTED),
    "Matroska": lambda: video(FRAMES, kind="matroska"),
    "sound beside": lambda: video(FRAMES, sound=True),
    "unlike times": lambda: video(FRAMES, times=[0, 1, 2, *range(100, 1000, 100)]),
}


@pytest.mark.parametrize("name", EXACT)
def test_lossless_frames_are_those_that_were_given(name: str) -> None:
    data = EXACT[name]()
    indices = header_of(data).indices
    assert len(indices) == 4
    found = decoded(data)
    assert all(np.array_equal(one, FRAMES[at]) for one, at in zip(found, indices, strict=True))


@pytest.mark.parametrize(
    ("codec", "kind", "options"),
    [
        ("libx264", "mp4", {"bf": "3"}),
        ("libx265", "mp4", {"preset": "ultrafast", "x265-params": "log-level=none"}),
        ("libsvtav1", "mp4", {"preset": "12"}),
        ("libvpx", "webm", {}),
        ("libvpx-vp9", "webm", {}),
        ("libsvtav1", "webm", {"preset": "12"}),
    ],
)
def test_frames_of_every_codec_are_the_sampled_ones(
    codec: str, kind: str, options: dict[str, str]
) -> None:
    data = video(FRAMES, codec, "yuv420p", kind=kind, options=options)
    for one, index in zip(decoded(data), header_of(data).indices, strict=True):
        losses = [np.abs(one.astype(int) - frame).mean() for frame in FRAMES]
        assert np.argmin(losses) == index
        assert losses[index] < 15


def test_odd_sizes_have_all_their_lines_and_columns() -> None:
    frames = drawn(2, 37, 53)
    assert [one.tolist() for one in decoded(video(frames))] == [one.tolist() for one in frames]


@pytest.mark.parametrize(
    ("matrix", "turn"),
    [((0, 1, 0, -1, 0), -1), ((-1, 0, 0, 0, -1), 2), ((0, -1, 0, 1, 0), 1)],
)
def test_frames_are_turned_as_players_show_them(matrix: tuple[int, ...], turn: int) -> None:
    data = changed(MP4, b"tkhd", 40, *(each * ONE % (1 << 32) for each in matrix))
    for one, index in zip(decoded(data), header_of(data).indices, strict=True):
        assert np.array_equal(one, np.rot90(FRAMES[index], turn))


def test_an_edit_list_leaves_no_frame_out() -> None:
    data = changed(MP4, b"elst", 12, 4 * 512)  # it begins with the fifth frame
    assert header_of(data).indices[0] == 0
    assert np.array_equal(decoded(data)[0], FRAMES[0])


def damaged() -> bytes:
    at = MP4.index(b"mdat") + 2000
    return MP4[:at] + np.random.default_rng(1).bytes(3000) + MP4[at + 3000 :]


def beyond_its_end() -> bytes:
    place = MP4.index(b"stco") + 12
    return MP4[:place] + struct.pack(">I", 2**31) + MP4[place + 4 :]


BAD: dict[str, tuple[Callable[[], bytes], str]] = {
    "damaged": (damaged, "cannot be decoded"),
    "frames beyond its end": (beyond_its_end, "cannot be decoded"),
    "a smaller size": (
        lambda: changed(MP4, b"avc1", 24, 16, 16, layout="H"),
        "says 16 x 16 pixels, and frame 0 has 64 x 48|Invalid data|16 x 16",
    ),
    "another codec": (lambda: MP4.replace(b"avc1", b"vp09"), "cannot be decoded"),
    "fewer frames": (lambda: webm(*[SHOWN] * 9), "cannot be decoded"),
    "no decoder's data": (lambda: MP4.replace(b"avcC", b"free"), "cannot be decoded"),
}


@pytest.mark.parametrize("name", BAD)
def test_what_only_decoding_shows_is_an_error(name: str) -> None:
    data, message = BAD[name]
    with pytest.raises(InvalidRequestError, match=message):
        decoded(data())
    assert np.array_equal(decoded(MP4)[0], FRAMES[0])


def test_a_large_video_in_a_small_header_takes_no_memory() -> None:
    large = video(drawn(2, 1600, 2400))
    data = changed(large, b"avc1", 24, 16, 16, layout="H")
    assert decoder_bytes(header_of(data)) < 65 << 20
    with pytest.raises(InvalidRequestError, match="cannot be decoded"):
        decoded(data)


def test_more_memory_than_allowed_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    data = video(drawn(2, 1600, 2400))
    monkeypatch.setattr(videos, "decoder_bytes", lambda _: 16 << 20)
    with pytest.raises(InvalidRequestError, match="more than 16 MiB"):
        decoded(data)


PROGRAM = decoder._PROGRAM


@pytest.fixture
def instead(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[str], None]:
    """Run another program, as if a file had taken the decoder over."""

    def run(source: str) -> None:
        program = tmp_path / "program.py"
        program.write_text(
            f"import runpy\nmade = runpy.run_path({str(PROGRAM)!r})\nconfine = made['confine']\n"
            + textwrap.dedent(source),
            encoding="utf-8",
        )
        monkeypatch.setattr(decoder, "_PROGRAM", program)

    return run


ENDS = {
    "a crash": ("import ctypes; confine(1 << 28, 9); ctypes.string_at(0)", "ended with SIGSEGV"),
    "an exit": ("raise SystemExit(7)", "ended with status 7"),
    "a loop": ("confine(1 << 28, 1)\nwhile True: pass", "takes more than 60 s to decode"),
    "no words": ("import os; os.write(1, b'Fab')", "ended with status 0"),
    "a long reason": ("import os; os.write(1, b'E' + b'a' * 60000)", "a" * 300 + "$"),
    "unprintable": ("import os; os.write(1, b'E\\x1b[31mred\\xff')", r"decoded: \[31mred"),
}


@pytest.mark.parametrize("name", ENDS)
def test_a_decoder_that_breaks_down_is_an_error(
    instead: Callable[[str], None], name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    source, message = ENDS[name]
    with monkeypatch.context():
        instead(source)
        with pytest.raises(InvalidRequestError, match=message):
            decoded(MP4)
    monkeypatch.undo()
    assert np.array_equal(decoded(MP4)[0], FRAMES[0])


def test_a_decoder_that_stands_still_is_ended(
    instead: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(decoder, "_SECONDS", 0.3)
    instead("import time; time.sleep(3600)")
    with pytest.raises(InvalidRequestError, match=f"ended with {signal.SIGKILL.name}"):
        decoded(MP4)


def told(instead: Callable[[str], None], source: str) -> Any:
    """What a program in the decoder's place says, as JSON."""
    instead("import json, os\ndef tell(it): os.write(1, b'E' + json.dumps(it).encode())\n" + source)
    with pytest.raises(InvalidRequestError) as caught:
        decoded(MP4)
    said = caught.value.message.removeprefix("a video cannot be decoded: ")
    assert said[:1] in ("[", "{"), said
    return json.loads(said)


def test_the_process_has_the_file_a_pipe_and_nothing_else(
    instead: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("INLAY_API_KEY", "secret")
    found = told(
        instead,
        "fds = {n: os.readlink(f'/proc/self/fd/{n}') for n in range(100)"
        " if os.path.exists(f'/proc/self/fd/{n}') or n < 3}\n"
        "tell([sorted(set(os.environ) - {'LC_CTYPE'}), fds, os.getcwd()])",
    )
    names, descriptors, folder = found
    assert names == []
    assert folder == "/"
    kinds = {number: target.partition(":")[0] for number, target in descriptors.items()}
    assert kinds == {"0": "/memfd", "1": "pipe", "2": "/dev/null"}


TRIED = """
import socket, sys, ctypes, mmap
libc = ctypes.CDLL(None, use_errno=True)
file = {file!r}
buffer = ctypes.create_string_buffer(64)
class Piece(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))
here = Piece(ctypes.addressof(buffer), 64)
import subprocess, threading
parent = os.getppid()
confined = {confined}
if confined:
    confine(1 << 28, 9)
done = []
def tries(name, action):
    try:
        if action() != -1:
            done.append(name)
    except (OSError, RuntimeError):
        pass
tries("open", lambda: open(file).read())
tries("write", lambda: open(file + ".new", "w"))
tries("list", lambda: os.listdir("/"))
tries("folder", lambda: os.mkdir(file + ".d"))
tries("stat", lambda: os.stat(file))
tries("socket", lambda: socket.socket())
tries("pair", lambda: socket.socketpair())
tries("kill", lambda: os.kill(parent, 0))
tries("thread", lambda: threading.Thread(target=int).start())
if confined:
    tries("remove", lambda: os.unlink(file))
    tries("rename", lambda: os.rename(file, file + ".b"))
    tries("fork", lambda: os.fork())
    tries("run", lambda: os.execv("/bin/true", ["true"]))
    tries("memory of the parent", lambda: libc.process_vm_readv(
        parent, ctypes.byref(here), 1, ctypes.byref(here), 1, 0))
    tries("ptrace", lambda: libc.ptrace(16, parent, 0, 0))
tries("prctl", lambda: libc.prctl(38, 0, 0, 0, 0))
tries("shared memory", lambda: os.memfd_create("a"))
tries("a copy of a descriptor", lambda: os.dup(1))
tries("grow the file", lambda: os.pwrite(0, b"a", 1 << 30))
tries("io_uring", lambda: libc.syscall(425, 8, ctypes.byref(buffer)))
tell(done)
"""


def test_a_taken_over_process_reaches_nothing(
    instead: Callable[[str], None], tmp_path: Path
) -> None:
    file = tmp_path / "kept"
    file.write_text("a", encoding="utf-8")
    assert told(instead, TRIED.format(file=str(file), confined=True)) == []
    assert [each.name for each in tmp_path.iterdir() if each.suffix != ".py"] == ["kept"]
    free = told(instead, TRIED.format(file=str(file), confined=False))
    assert {"open", "write", "folder", "socket", "kill", "thread", "shared memory"} <= set(free)


def test_who_stops_reading_leaves_no_process() -> None:
    frames = decode_frames(memoryview(MP4), header_of(MP4))
    next(frames)
    children = Path(f"/proc/self/task/{os.getpid()}/children")
    before = children.read_text(encoding="utf-8").split()
    frames.close()  # type: ignore[attr-defined]
    assert len(children.read_text(encoding="utf-8").split()) == len(before) - 1


def test_without_pyav_there_is_no_decoding(monkeypatch: pytest.MonkeyPatch) -> None:
    assert decoder.can_decode()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert not decoder.can_decode()
    with pytest.raises(InvalidRequestError, match=r"pip install 'inlay-server\[video\]'"):
        decoded(MP4)
