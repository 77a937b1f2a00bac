"""Fuzz the readers of images', audio's and videos' headers.

Bytes are refused with an `InvalidRequestError`, or have a size within limits, which for images is
Pillow's wherever Pillow can open them.

    python -m tests.fuzz.fuzz_media image --executions 1000000 [--seed 1]
    python -m tests.fuzz.fuzz_media audio --atheris FOUND -runs=10000000 -max_len=2048
"""

import base64
import contextlib
import io
import random
import re
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from urllib.parse import unquote

from inlay.base.errors import InvalidRequestError
from tests.fuzz.guided import instrumented, run
from tests.fuzz.mutation import mutated

WORDS = (
    b"IHDR", b"IDAT", b"IEND", b"eXIf", b"acTL", b"RIFF", b"WEBP", b"WAVE", b"VP8 ", b"VP8L", b"VP8X", b"ANMF", b"EXIF", b"Exif\0\0", b"II*\0", b"MM\0*",
    b"\xff\xd8\xff", b"\xff\xc0", b"\xff\xc2", b"\xff\xda", b"\xff\xe1", b"\xff\xd9", b"GIF89a", b"!\xf9", b",", b"BM", b"\x12\x01\x03\0\1\0\0\0",
    b"ftyp", b"moov", b"trak", b"stts", b"stsz", b"moof", b"traf", b"trun", b"tfhd", b"mdat", b"\x1a\x45\xdf\xa3", b"\x1f\x43\xb6\x75", b"\xa3", b"\xae",
    b"\x01\x12\0\x03\0\0\0\1", b"fLaC", b"ID3", b"TAG", b"Xing", b"Info", b"VBRI", b"\xff\xfb\x90\x64", b"\xff\xf3\x40\xc4", b"fmt ", b"data", b"LIST",
    b"RF64", b"ds64", b"APETAGEX", b"data:", b"data:video/jpeg", b";fps=", b"nan", b"-1e999", b";base64,", b"%3D", b"%", b"\r\n", b"=", b"-_",
)  # fmt: skip
_MAX_PIXELS = 1 << 24
_LETTERS = {**dict.fromkeys(map(ord, " \t\n\f\r")), ord("-"): "+", ord("_"): "/"}


def check_image(data: bytes) -> bool:
    """Read `data` as a server would; True if it is accepted.

    Raises:
        AssertionError: it was accepted and should not have been.
    """
    from inlay.media.image import FORMATS, pixels_alone, read_image_header

    try:
        found = read_image_header(data, max_pixels=_MAX_PIXELS)
    except InvalidRequestError as refusal:
        _check_message(refusal)
        return False
    assert 1 <= found.height * found.width <= _MAX_PIXELS
    assert 1 <= found.orientation <= 8
    from PIL import Image

    size: tuple[int, int] | None = None
    # Pillow raises errors of many kinds for what it cannot open.
    with contextlib.suppress(Exception), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with Image.open(io.BytesIO(data), formats=FORMATS) as image:
            size = image.size
    if size is not None:
        with Image.open(io.BytesIO(pixels_alone(data, found)), formats=(found.format,)) as image:
            assert image.size == size, "what is left of the file is another picture"
    seen = (found.width, found.height)
    assert size in (None, seen[::-1] if found.orientation > 4 else seen), (size, found)
    return True


def check_audio(data: bytes) -> bool:
    """Read `data` as a server would; True if it is accepted.

    Raises:
        AssertionError: it was accepted and should not have been.
    """
    from inlay.media.audio import decodable, read_audio_header

    try:
        found = read_audio_header(data)
    except InvalidRequestError as refusal:
        _check_message(refusal)
        return False
    assert 1 <= found.samples <= len(data) * 65535
    assert found.seconds <= 600
    assert found.samples_at(16000) >= 1
    # A decoder gets what was read.
    assert read_audio_header(decodable(memoryview(data), found)) == found
    return True


def check_data_url(data: bytes) -> bool:
    """Read `data` as a data: URL; True if it holds what browsers would find, but for its letters.

    Raises:
        AssertionError: it does not.
    """
    from inlay.media.data_url import (
        data_url_body,
        decode_data_url,
        decode_frames_url,
        is_frames,
    )

    url = data.decode("latin-1")
    if is_frames(url):
        try:
            packed = decode_frames_url(url, max_bytes=1000)
        except InvalidRequestError as refusal:
            _check_message(refusal)
            return False
        assert len(packed) < 1000 + 100 * (1 + url.count(","))
        return True
    try:
        found = decode_data_url(url, max_bytes=1000)
    except InvalidRequestError as refusal:
        _check_message(refusal)
        return False
    text = unquote(url[data_url_body(url) :], "latin-1").translate(_LETTERS).rstrip("=")
    assert found == base64.b64decode(text + "=" * (-len(text) % 4), validate=True)
    return True


def check_video(data: bytes) -> bool:
    """Read `data` as a server would; True if it is accepted.

    Raises:
        AssertionError: it was accepted and should not have been.
    """
    from inlay.media.frames import read_video_header

    try:
        found = read_video_header(data, max_frames=64, max_pixels=_MAX_PIXELS, containers=True)
    except InvalidRequestError as refusal:
        _check_message(refusal)
        return False
    assert 1 <= len(found.indices) == len(found.seconds) <= 64
    assert list(found.indices) == sorted(set(found.indices))
    most = 10 if found.container is None else 100
    assert (found.indices[-1] + 1) * found.height * found.width <= most * _MAX_PIXELS
    assert 0 < found.fps < 1000
    assert found.seconds[0] == 0
    return True


def _check_message(refusal: InvalidRequestError) -> None:
    if len(refusal.message) >= 1000 or not refusal.message.isprintable():
        raise AssertionError(f"a message of {len(refusal.message)} characters")
    if re.search(r" at 0x|(?<![^ (])b'.*'", refusal.message):
        raise AssertionError(refusal.message)


def seeds(target: str) -> list[bytes]:
    """Small files of every kind."""
    if target == "image":
        from tests.media.test_image import SAMPLES, animations

        return [*SAMPLES, *animations()]
    if target == "video":
        from tests.media.test_containers import SMALL, file
        from tests.media.test_frames import SAMPLES as CLIPS

        return [*CLIPS, *map(file, SMALL)]
    if target == "data_url":
        encoded = base64.b64encode(bytes(range(256)))
        texts = (encoded, encoded.rstrip(b"="), base64.encodebytes(bytes(90)), b"AA%3D%3D", b"-_-_")
        urls = [b"data:image/png;base64," + text for text in texts]
        frames = (b"", b";fps=2.5")
        return urls + [b"data:video/jpeg" + fps + b";base64," + b",".join(texts) for fps in frames]
    from tests.media.test_audio import APE, ID3, wav
    from tests.media.test_audio import SAMPLES as SOUNDS

    return [*SOUNDS, *(ID3 + APE + sound for sound in SOUNDS), wav(said=0), wav(said=1 << 31)]


TARGETS: dict[str, Callable[[bytes], bool]] = {
    "image": check_image,
    "audio": check_audio,
    "video": check_video,
    "data_url": check_data_url,
}


def fuzz(target: str, executions: int, seed: int) -> int:
    """Check `executions` mutations of the seeds; how many were accepted."""
    rng, inputs = random.Random(seed), seeds(target)
    accepted = 0
    for _ in range(executions):
        data = mutated(rng.choice(inputs), inputs, WORDS, rng)
        try:
            accepted += TARGETS[target](data)
        except BaseException:
            Path("crash.bin").write_bytes(data)
            raise
    return accepted


def main(arguments: Sequence[str]) -> None:
    """Run what the module's docstring says."""
    target, mode, *options = arguments
    if mode == "--executions":
        seed = int(options[2]) if len(options) > 2 else 1
        print(fuzz(target, int(options[0]), seed), "accepted")
        return
    with instrumented("inlay.media"):
        import inlay.media.audio
        import inlay.media.containers
        import inlay.media.data_url
        import inlay.media.frames
        import inlay.media.image  # noqa: F401
    inputs = seeds(target)
    with tempfile.TemporaryDirectory() as started:
        for number, data in enumerate(inputs):
            (Path(started) / str(number)).write_bytes(data)
        run(
            TARGETS[target],
            [lambda data, rng: mutated(data, inputs, WORDS, rng)],
            options,
            [Path(started)],
        )


if __name__ == "__main__":
    main(sys.argv[1:])
