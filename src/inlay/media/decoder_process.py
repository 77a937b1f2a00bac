"""The process that decodes one file, started by `inlay.media.decoder` and trusted by nobody.

A file of its own, run by `python -I`: it imports the standard library and PyAV alone. Standard
input is the file, the one argument what is wanted of it, standard output takes it. Of a video the
frames: each `F` and its pixels, 8-bit RGB. Of a sound its samples: each `S`, then rate, channels,
kind of sample and number (none at the end), then the samples, those of all channels together. Or
`E` and the reason why there is no more.
"""

import ctypes
import json
import os
import platform
import resource
import struct
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import av
import av.audio.codeccontext
import av.audio.frame
import av.audio.stream
import av.subtitles.codeccontext
import av.subtitles.stream  # PyAV imports these late, when no file can be opened any more
import av.video.codeccontext
import av.video.stream

_CALLS = {
    "x86_64": (
        0xC000003E,
        (0, 1, 3, 5, 8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 28, 60, 202, 219, 228, 231, 318),
    ),
    "aarch64": (
        0xC00000B7,
        (
            63, 64, 57, 80, 62, 222, 226, 215, 214, 134, 135,
            139, 124, 216, 233, 93, 98, 128, 113, 94, 278,
        ),
    ),
}  # fmt: skip
"""The kernel's number of an architecture, and those of system calls: read, write, close, fstat,
lseek, mmap, mprotect, munmap, brk, rt_sigaction, rt_sigprocmask, rt_sigreturn, sched_yield, mremap,
madvise, exit, futex, restart_syscall, clock_gettime, exit_group, getrandom. All others fail."""

_SET_NO_NEW_PRIVS, _SET_SECCOMP, _FILTER = 38, 22, 2
_LOAD, _EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _REFUSE, _KILL = 0x7FFF0000, 0x00050001, 0x80000000

_DECODERS = {"h264": "h264", "hevc": "hevc", "vp8": "vp8", "vp9": "vp9", "av1": "libdav1d"}


_SOUNDS = {
    "aac": "aac", "alac": "alac", "flac": "flac", "mp3": "mp3float,mp3", "opus": "opus,libopus",
    "vorbis": "vorbis",
}  # fmt: skip
"""Decoders that may run by the name of a codec."""

_KINDS = ("u8", "s16", "s32", "flt", "dbl")
"""Kinds of samples, by their number."""

_PLANAR = 8
"""Added to it where each channel's samples stand together."""


class _Program(ctypes.Structure):
    _fields_ = (("length", ctypes.c_ushort), ("code", ctypes.c_char_p))


class _Refused(Exception):
    """A reason that the client is told."""


def confine(memory: int, seconds: int) -> None:
    """Give up all that decoding does not need, for good.

    Args:
        memory: bytes of address space beyond those taken so far.
        seconds: of processor time.

    Raises:
        OSError: the system does not do it.
    """
    if len([*Path("/proc/self/task").iterdir()]) != 1:
        raise OSError("a filter of system calls holds for one thread, and there are more")
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()[0]
    taken = int(pages) * resource.getpagesize()
    os.nice(10)
    for limit, most in (
        (resource.RLIMIT_AS, taken + memory),
        (resource.RLIMIT_CORE, 0),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_NOFILE, 0),  # none is opened, those that are open stay
        (resource.RLIMIT_NPROC, 0),
    ):
        resource.setrlimit(limit, (most, most))
    resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds + 1))
    architecture, calls = _CALLS[platform.machine()]
    steps = [
        (_LOAD, 0, 0, 4),
        (_EQUAL, 1, 0, architecture),
        (_RETURN, 0, 0, _KILL),
        (_LOAD, 0, 0, 0),
    ]
    steps += [(_EQUAL, len(calls) - place, 0, call) for place, call in enumerate(calls)]
    steps += [(_RETURN, 0, 0, _REFUSE), (_RETURN, 0, 0, _ALLOW)]
    code = b"".join(struct.pack("=HBBI", *step) for step in steps)
    program = _Program(len(steps), code)
    prctl = ctypes.CDLL(None, use_errno=True).prctl
    for call in ((_SET_NO_NEW_PRIVS, 1, 0), (_SET_SECCOMP, _FILTER, ctypes.byref(program))):
        if prctl(*call, 0, 0):
            raise OSError(ctypes.get_errno(), "the system has no filter of system calls")


def frames(file: Any, task: dict[str, Any]) -> Iterator[bytes]:
    """Decode the wanted frames, each `F` and rows of RGB without gaps."""
    width, height = task["size"]
    limits = {"max_pixels": str((width + 128) * (height + 128))}
    decoder = _DECODERS[task["codec"]]
    options = {
        "codec_whitelist": decoder,
        "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm",
        "protocol_whitelist": "none",
    }
    if task["format"] == "mov":
        options |= {"ignore_editlist": "1", "enable_drefs": "0", "use_absolute_path": "0"}
    with av.open(file, format=task["format"], options=options) as container:
        stream = next((each for each in container.streams.video), None)
        if stream is None:
            raise _Refused("it has no video that FFmpeg finds")
        if stream.codec_context.codec.canonical_name != task["codec"]:
            raise _Refused(f"it is not of the codec {task['codec']} that it says")
        stream.codec_context.thread_count = 1
        stream.codec_context.options = limits
        wanted = iter(task["indices"])
        index, following = 0, next(wanted)
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise _Refused("it is truncated")
            for frame in packet.decode():
                if (frame.width, frame.height) != (width, height):
                    raise _Refused(
                        f"it says {width} x {height} pixels, and frame {index} has "
                        f"{frame.width} x {frame.height}"
                    )
                if frame.is_corrupt:
                    raise _Refused(f"frame {index} is damaged")
                if index == following:
                    yield b"F" + _rgb(frame, width)
                    following = next(wanted, None)
                    if following is None:
                        return
                index += 1
    raise _Refused(f"it says {task['frames']} frames and has {index} that can be decoded")


def sounds(file: Any, task: dict[str, Any]) -> Iterator[bytes]:
    """Decode the first sound, as pieces of the output."""
    options = {
        "codec_whitelist": ",".join(_SOUNDS.values()),
        "format_whitelist": "mov,mp4,m4a,3gp,3g2,mj2,matroska,webm,ogg,aac",
        "protocol_whitelist": "none",
    }
    if task["format"] == "mov":
        options |= {"enable_drefs": "0", "use_absolute_path": "0"}
    done = rate = 0
    with av.open(file, format=task["format"], options=options) as container:
        stream = next((each for each in container.streams.audio), None)
        if stream is None:
            raise _Refused("it has no sound that FFmpeg finds")
        codec = stream.codec_context.codec.canonical_name
        if codec not in _SOUNDS:
            raise _Refused(f"its sound is of the codec {codec}; read are {', '.join(_SOUNDS)}")
        stream.codec_context.thread_count = 1
        for packet in container.demux(stream):
            if packet.is_corrupt:
                raise _Refused("it is truncated")
            for frame in packet.decode():
                rate = frame.sample_rate
                done += frame.samples
                if done > task["most"] * rate:
                    raise _Refused(f"it is longer than {task['most']:g} s")
                if frame.samples:
                    yield _samples(frame)
    if not done:
        raise _Refused("it has no samples")
    yield struct.pack("<cIBBI", b"S", rate, 1, 0, 0)


def _samples(frame: Any) -> bytes:
    name, channels, count = frame.format.name, len(frame.layout.channels), frame.samples
    packed = name.removesuffix("p")
    size = frame.format.bytes * count * (channels if packed == name else 1)
    kind = _KINDS.index(packed) + _PLANAR * (packed != name)
    samples = b"".join(bytes(plane)[:size] for plane in frame.planes)
    return struct.pack("<cIBBI", b"S", frame.sample_rate, channels, kind, count) + samples


def _rgb(frame: Any, width: int) -> bytes:
    plane = frame.reformat(format="rgb24", threads=1).planes[0]
    rows, line = bytes(plane), plane.line_size
    if line == width * 3:
        return rows
    return b"".join(rows[at : at + width * 3] for at in range(0, len(rows), line))


def main() -> None:
    """Confine the process, and write what is wanted."""
    task = json.loads(sys.argv[1])
    out = os.fdopen(1, "wb")
    file = os.fdopen(0, "rb")
    try:
        confine(task["memory"], task["seconds"])
        for piece in {"video": frames, "sound": sounds}[task["kind"]](file, task):
            out.write(piece)
            out.flush()
    except _Refused as error:
        reason = str(error)
    except (MemoryError, av.MemoryError):
        reason = f"its decoder takes more than {task['memory'] >> 20} MiB"
    except av.FFmpegError as error:
        reason = error.strerror or "FFmpeg gives no reason"
    except OSError as error:
        reason = f"its decoder cannot be confined ({error.strerror or error})"
    else:
        return
    out.write(b"E" + reason.encode("ascii", "replace"))
    out.flush()


if __name__ == "__main__":
    main()
