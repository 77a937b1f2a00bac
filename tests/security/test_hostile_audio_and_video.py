"""Audio and videos that no client should have sent, as in `test_hostile_images`.

What lies about its length, and what a decoder would grow without end, is refused from its header.
"""

import base64
import io
from collections.abc import Iterator
from functools import cache
from typing import Any

import numpy as np
import openai
import pytest
import soundfile
from PIL import Image

from tests.engine.torch.encode_reference import damaged
from tests.equality.test_sound_and_video_over_http import TEMPLATES, directory
from tests.media.clips import drawn, video
from tests.media.test_audio import flac, wav
from tests.media.test_containers import SHOWN, changed, references, webm
from tests.scratch import scratch
from tests.security.test_hostile_images import (
    GOOD,
    MIB,
    PICTURE,
    Part,
    by_data,
    by_embeds,
    by_url,
    chat,
    encoded,
    hardly_growing,
    refused,
)
from tests.serving import Served, serving

FLAGS = "--served-model-name", "m", "--max-media-bytes", 32 * MIB


@pytest.fixture(scope="module")
def listening() -> Iterator[Served]:
    with serving(directory("qwen2_audio"), *FLAGS) as served:
        yield served


@pytest.fixture(scope="module")
def watching() -> Iterator[Served]:
    case, there = "qwen2_5_vl+video", scratch("allowed-media")
    template = there / "template.jinja"
    template.write_text(TEMPLATES[case] + "{% if twice %}<|video_pad|>{% endif %}")
    flags = "--allowed-local-media-path", there, "--chat-template", template
    with serving(directory(case), *FLAGS, *flags) as served:
        yield served


def client_of(server: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0)


def sound(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "audio_url", "audio_url": {"url": "data:audio/wav;base64," + encoded}}


def given(data: str, format_: str) -> dict[str, Any]:
    return {"type": "input_audio", "input_audio": {"data": data, "format": format_}}


def frames(*pictures: bytes) -> dict[str, Any]:
    files = ",".join(base64.b64encode(each).decode() for each in pictures)
    return {"type": "video_url", "video_url": {"url": "data:video/jpeg;base64," + files}}


def clip(data: bytes) -> dict[str, Any]:
    encoded = base64.b64encode(data).decode()
    return {"type": "video_url", "video_url": {"url": "data:video/gif;base64," + encoded}}


def silence(seconds: int, format_: str) -> bytes:
    """A file of silence, which takes nearly no bytes and decodes to many."""
    out = io.BytesIO()
    soundfile.write(out, np.zeros(16_000 * seconds, np.int16), 16_000, format=format_)
    return out.getvalue()


def animated(count: int, side: int) -> bytes:
    """A GIF of equal pictures, each of which takes nearly no bytes."""
    pictures = [Image.new("P", (side, side), index % 2) for index in range(count)]
    return encoded(pictures[0], "GIF", save_all=True, append_images=pictures[1:], duration=40)


NOISE = (np.random.default_rng(2).standard_normal(9_000) * 3000).astype("<i2").tobytes()
GOOD_SOUND = sound(wav(data=NOISE))
GOOD_CLIP = frames(GOOD, encoded(PICTURE.rotate(90)))


@cache
def mp4() -> bytes:
    return video(drawn(9))


def noise() -> bytes:
    """An MP4 whose frames are noise."""
    data = mp4()
    at, end = data.index(b"mdat") + 4, data.index(b"moov") - 4
    return data[:at] + np.random.default_rng(3).bytes(end - at) + data[end:]


SOUNDS: dict[str, tuple[Part, str]] = {
    "nothing": (sound(b""), "audio is empty"),
    "a text": (sound(b"hello, this is none"), "of no known format"),
    "Ogg of nothing": (sound(b"OggS\x00\x02" + bytes(99)), "audio cannot be decoded"),
    "MP4 of pictures": (cache(lambda: sound(mp4())), "no sound that FFmpeg finds"),
    "WebM cut in its header": (cache(lambda: sound(webm()[:40])), "audio cannot be decoded"),
    "WAV cut in its header": (sound(wav()[:30]), "malformed WAV: it is truncated"),
    "WAV without channels": (sound(wav(channels=0)), "0 channels"),
    "WAV of 12 bits": (sound(wav(bits=12)), "read are integers of 8 to 32 bits"),
    "WAV at 4 GHz": (sound(wav(rate=2**32 - 1)), "at 4294967295 Hz"),
    "WAV of eleven minutes": (sound(wav(data=bytes(16_000 * 2 * 660))), "660.0 s long"),
    "WAV at 1 Hz": (sound(wav(rate=1, data=bytes(2000))), "1 channels at 1 Hz"),
    "FLAC that says more": (sound(flac(2**36 - 1, bytes(99))), "cannot hold 68719476735 samples"),
    "FLAC without frames": (sound(flac(16_000, bytes(60_000))), "cannot be decoded"),
    "FLAC of silence": (cache(lambda: sound(silence(1200, "FLAC"))), "allowed: 600 s"),
    "MP3 of silence": (
        cache(lambda: sound(silence(500, "MP3"))),
        "s long; this model hears at most 2 s",
    ),
    "MP3 cut short": (sound(b"\xff\xfb\x90\x00" + bytes(20)), "has no samples"),
    "no base64": (given("%%", "wav"), "does not hold valid base64"),
    "another format": (
        given("AAAA", "amr"),
        "must be one of wav, mp3, flac, ogg, opus, webm, m4a, mp4, aac, got",
    ),
    "a number": ({"type": "input_audio", "input_audio": 5}, "must be an object with data"),
    "no URL": ({"type": "audio_url"}, "must be a string, a URL"),
    "WAV of a click": (sound(wav(data=bytes(2))), "too short to be heard"),
    "an image": (by_data(GOOD), "takes no images; kinds of media it takes: audio"),
}
VIDEOS: dict[str, tuple[Part, str]] = {
    "MP4 of nothing": (clip(b"\x00\x00\x00\x10ftypmp42" + bytes(8)), "malformed MP4"),
    "MP4 cut short": (cache(lambda: clip(mp4()[:-9])), "it is truncated"),
    "MP4 of 16384 x 16384": (
        cache(lambda: clip(changed(mp4(), b"avc1", 24, 16384, 16384, layout="H"))),
        "16384 x 16384 pixels; allowed: 1 to 10000000",
    ),
    "MP4 of many frames": (
        cache(lambda: clip(changed(mp4(), b"stts", 8, 2**31))),
        "2147483648 frames; allowed: 36000",
    ),
    "MP4 of sound": (cache(lambda: clip(mp4().replace(b"vide", b"soun"))), "without a video track"),
    "MP4 of frames elsewhere": (cache(lambda: clip(references(b"url ", 0))), "is not opened"),
    "MP4 of noise": (cache(lambda: clip(noise())), "a video cannot be decoded"),
    "MP4 larger than it says": (
        cache(lambda: clip(changed(video(drawn(2, 1600, 2400)), b"avc1", 24, 16, 16, layout="H"))),
        "a video cannot be decoded",
    ),
    "WebM of empty frames": (clip(webm(*[SHOWN] * 9)), "a video cannot be decoded"),
    "a playlist": (clip(b"#EXTM3U\nhttp://127.0.0.1/a.ts"), "ready-made frames"),
    "a list of files": (clip(b"ffconcat version 1.0\nfile '/etc/passwd'"), "ready-made frames"),
    "a text": (clip(b"hello"), "of no known format"),
    "GIF cut short": (clip(encoded(PICTURE, "GIF")[:20]), "a malformed GIF: it is truncated"),
    "nothing": (frames(b""), "frame 0 of a video: an image is empty"),
    "a damaged frame": (frames(GOOD, damaged(GOOD)), "cannot be decoded"),
    "frames of two sizes": (frames(GOOD, encoded(PICTURE.resize((90, 30)))), "must have one size"),
    "thousands of frames": (
        cache(lambda: frames(*[encoded(PICTURE.resize((4, 4)))] * 3000)),
        "has 3000 frames; allowed: 1 to 8",
    ),
    "GIF of a large side": (
        cache(lambda: clip(animated(2, 7000))),
        "7000 x 7000 pixels; allowed: 40000000",
    ),
    "a file elsewhere": (by_url("file:///etc/hostname"), "below the allowed path has this file:"),
    "embeddings": (by_embeds("QUJD" * 100), "You must set --enable-mm-embeds"),
    "a thin picture": (
        by_data(encoded(Image.new("RGB", (1000, 4)))),
        "may be at most 200 times the shorter",
    ),
    "a sound": (GOOD_SOUND, "takes no audio; kinds of media it takes: image, video"),
}


@pytest.mark.parametrize("name", list(SOUNDS))
def test_bad_audio_is_a_precise_error_beside_neighbours(listening: Served, name: str) -> None:
    with client_of(listening) as client:
        refused(listening, client, *SOUNDS[name], GOOD_SOUND)


@pytest.mark.parametrize("name", list(VIDEOS))
def test_a_bad_video_is_a_precise_error_beside_neighbours(watching: Served, name: str) -> None:
    with client_of(watching) as client:
        refused(watching, client, *VIDEOS[name], GOOD_CLIP)


def test_a_template_that_writes_an_item_twice_is_an_error_of_the_request(
    watching: Served,
) -> None:
    with client_of(watching) as client:
        twice = {"chat_template_kwargs": {"twice": True}}
        with pytest.raises(openai.BadRequestError, match=r"the chat template wrote .* 2 times for"):
            chat(client, GOOD_CLIP, extra_body=twice)
        assert chat(client, GOOD_CLIP).choices


def test_a_long_animation_is_seen_in_little_memory(watching: Served) -> None:
    many = clip(animated(3000, 64))
    with client_of(watching) as client, hardly_growing(watching):
        assert chat(client, many).choices[0].message.content
