"""What libraries say of a client's file, and what of it clients see."""

import io
import re
from collections.abc import Callable

import numpy as np
import pytest
import soundfile
from PIL import Image

from inlay.base.errors import EngineError, InvalidRequestError, reason_of
from inlay.engine.pictures import decode
from inlay.http.errors import error_json, shown
from inlay.media.audio import read_audio_header
from inlay.media.image import read_image_header
from inlay.media.sounds import decode_sound
from inlay_stages.api.schema.failure import StreamFailure

PYTHON = re.compile(r"0x[0-9a-f]{6}|object at|\bb'|BytesIO")


def refusal(read: Callable[[memoryview], object], data: bytes | bytearray) -> str:
    """What is said of a file; nothing where it is read."""
    try:
        read(memoryview(data))
    except InvalidRequestError as refused:
        return refused.message
    return ""


def test_an_mp3_of_false_syncs_is_refused_without_the_servers_own_objects() -> None:
    data = (b"\xff\xf3\x10\xc4" + b"\x55" * 100) * 20
    with pytest.raises(InvalidRequestError, match=r"its decoder finds no MP3 in it$"):
        decode_sound(memoryview(data), read_audio_header(data), 16000)


@pytest.mark.parametrize("format_", ["WAV", "FLAC", "MP3"])
def test_no_damaged_sound_tells_of_the_servers_own_objects(format_: str) -> None:
    file = io.BytesIO()
    soundfile.write(file, np.zeros(4000, np.float32), 16000, format=format_)
    rng = np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(file.getvalue())
        for at in rng.integers(0, len(data), 12):
            data[at] = rng.integers(256)
        said = refusal(lambda data: decode_sound(data, read_audio_header(data), 16000), data)
        assert not PYTHON.search(said), said


@pytest.mark.parametrize("format_", ["PNG", "JPEG", "WEBP", "GIF", "BMP"])
def test_no_damaged_picture_tells_of_the_servers_own_objects(format_: str) -> None:
    file = io.BytesIO()
    Image.effect_noise((40, 30), 90).save(file, format_)
    rng = np.random.default_rng(0)
    for _ in range(60):
        data = bytearray(file.getvalue())
        for at in rng.integers(20, len(data), 12):
            data[at] = rng.integers(256)
        said = refusal(lambda data: decode(data, read_image_header(data)), data)
        assert not PYTHON.search(said), said


def test_what_a_library_says_is_told_in_a_clients_words() -> None:
    said = f"Error opening {io.BytesIO()!r}: chunk b'IDAT' is broken"
    assert reason_of(ValueError(said)) == "Error opening the file: chunk 'IDAT' is broken"


def test_no_error_of_any_kind_tells_the_address_of_an_object() -> None:
    failed = EngineError(f"the model failed: TypeError: {object()!r} and {print!r}, {test_names!r}")
    for body in (error_json(failed).decode(), str(StreamFailure.of(shown(failed)).error)):
        assert "the model failed: TypeError: <object> and <built-in function print>" in body
        assert "<function test_names>" in body
        assert "0x" not in body


def test_names() -> None:
    assert repr(test_names).startswith("<function test_names at 0x")
