"""Frames of MP4 and WebM, decoded by PyAV (FFmpeg) in a process that can do nothing else.

Each video has a process of its own (`video_process.py`), which ends with it: no client's video
meets another's, and whoever takes it over holds a memory file and a pipe. It has no environment, no
descriptor but these, limits on memory and time, and a filter of system calls. Linux on x86-64 and
on 64-bit Arm have the filter; elsewhere nothing is decoded.
"""

import importlib.util
import json
import os
import platform
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

from PIL import Image

from inlay.base.errors import InvalidRequestError
from inlay.base.pace import check_wanted
from inlay.engine.decoding import decoder_bytes
from inlay.media.frames import CANNOT_DECODE, VideoHeader

CPU_SECONDS = 60
"""Processor time of one video."""

_SECONDS = 180
"""Time of one video where its process or the machine stands still."""

_PROGRAM = Path(__file__).with_name("video_process.py")
_MAX_REASON = 300
_LOOK_MILLISECONDS = 100


def can_decode() -> bool:
    """Return True if PyAV is installed and the system can confine it."""
    known = platform.machine() in ("x86_64", "aarch64")
    return sys.platform == "linux" and known and importlib.util.find_spec("av") is not None


def decode_container(data: memoryview, header: VideoHeader) -> Iterator[Image.Image]:
    """Decode the sampled frames of an MP4 or WebM, as they lie in the file, one after the other.

    Raises:
        InvalidRequestError: the file is damaged or not what its header says, takes too long or too
            much memory, or its decoder broke down.
    """
    said = header.container
    if said is None or not can_decode():
        raise InvalidRequestError(CANNOT_DECODE)
    task = {
        "format": {"MP4": "mov", "WEBM": "matroska"}[said.format],
        "codec": said.codec,
        "size": (said.width, said.height),
        "frames": said.frames,
        "indices": sorted(set(header.indices)),
        "memory": decoder_bytes(header),
        "seconds": CPU_SECONDS,
    }
    process = _started(data, task)
    # A process that neither works nor ends.
    timer = threading.Timer(_SECONDS, process.kill)
    timer.daemon = True
    timer.start()
    try:
        frame: Image.Image | None = None
        last = -1
        for index in header.indices:
            if frame is None or index != last:
                frame, last = _frame(process, said.width, said.height), index
            yield frame
    finally:
        timer.cancel()
        process.kill()
        assert process.stdout is not None
        process.stdout.close()
        process.wait()


def _started(data: memoryview, task: dict[str, object]) -> "subprocess.Popen[bytes]":
    with os.fdopen(os.memfd_create("video", os.MFD_CLOEXEC), "w+b") as whole:
        whole.write(data)
        whole.seek(0)
        return subprocess.Popen(
            [sys.executable, "-I", "-B", str(_PROGRAM), json.dumps(task)],
            stdin=whole,
            stdout=subprocess.PIPE,
            bufsize=0,
            stderr=subprocess.DEVNULL,
            env={},
            cwd="/",
            process_group=0,  # in a session of its own its niceness would not count
        )


def _read(process: "subprocess.Popen[bytes]", count: int) -> bytearray:
    """Read `count` bytes, or as many as come; raises as `check_wanted` meanwhile."""
    assert process.stdout is not None
    pipe = process.stdout.fileno()
    poll = select.poll()
    poll.register(pipe, select.POLLIN)
    found = bytearray()
    while len(found) < count:
        check_wanted()
        if poll.poll(_LOOK_MILLISECONDS):
            came = os.read(pipe, count - len(found))
            if not came:
                break
            found += came
    return found


def _frame(process: "subprocess.Popen[bytes]", width: int, height: int) -> Image.Image:
    kind = _read(process, 1)
    if kind == b"F":
        pixels = _read(process, width * height * 3)
        if len(pixels) == width * height * 3:
            return Image.frombuffer("RGB", (width, height), pixels, "raw", "RGB", 0, 1)
    if kind == b"E":
        reason = _read(process, _MAX_REASON).decode("ascii", "replace")
        printable = "".join(each for each in reason if each.isprintable())
        raise InvalidRequestError(f"a video cannot be decoded: {printable}")
    code = process.wait()
    if -code == signal.SIGXCPU:
        raise InvalidRequestError(f"a video takes more than {CPU_SECONDS} s to decode")
    name = signal.Signals(-code).name if code < 0 else f"status {code}"
    raise InvalidRequestError(f"a video cannot be decoded: its decoder ended with {name}")
