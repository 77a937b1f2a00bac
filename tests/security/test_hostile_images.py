"""Images that no client should have sent: a precise 4xx each, and neighbours that notice nothing.

One server of a tiny model answers all of them; after each one the same good chat has the same
answer, and meanwhile the memory of the server's processes has hardly grown.
"""

import base64
import io
import socket
import struct
import threading
import zlib
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import openai
import psutil
import pytest
import torch
from PIL import Image

from tests.engine.torch.encode_reference import damaged
from tests.media.hostile_files import many_scans, run_lengths
from tests.models import tiny
from tests.serving import Served, peak_growth, serving
from tests.vision_models import vision

MIB = 1024 * 1024
ROWS, HIDDEN = 16, 64


@pytest.fixture(scope="module")
def quiet_port() -> Iterator[int]:
    """A port that takes connections and never says anything."""
    with socket.create_server(("127.0.0.2", 0)) as listening, ExitStack() as open_:

        def accept() -> None:
            while True:
                try:
                    open_.enter_context(listening.accept()[0])
                except OSError:
                    return

        threading.Thread(target=accept, daemon=True).start()
        yield listening.getsockname()[1]


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(
        vision("llava"), "--served-model-name", "m", "--enable-prompt-embeds",
        "--enable-mm-embeds", "--limit-mm-per-prompt", '{"image": {"count": 2}}',
        "--media-timeout", 1, "--max-media-bytes", MIB, "--allowed-media-networks", "127.0.0.2/32",
    ) as served:  # fmt: skip
        yield served


@pytest.fixture(scope="module")
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        yield client


def chat(client: openai.OpenAI, *content: Any, **more: Any) -> Any:
    return client.chat.completions.create(
        model=more.pop("model", "m"),
        messages=[{"role": "user", "content": list(content)}],
        max_tokens=4,
        temperature=0,
        **more,
    )


def by_url(url: object) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


def by_data(data: bytes) -> dict[str, Any]:
    return by_url("data:image/png;base64," + base64.b64encode(data).decode())


def encoded(image: Image.Image, kind: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


PICTURE = Image.fromarray(np.random.default_rng(1).integers(0, 256, (40, 50, 3), dtype=np.uint8))
GOOD = encoded(PICTURE)


def bomb(side: int, colour: int = 0, text: int = 0) -> bytes:
    """A black PNG, `side` x `side`, in some kilobytes.

    Its pixels have one bit, or 24 with the colour type 2. `text` is the length of a text before
    them, compressed too.
    """

    def chunk(kind: bytes, body: bytes) -> bytes:
        return (
            struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body))
        )

    packer = zlib.compressobj(9)
    line = bytes(1 + (3 * side if colour else (side + 7) // 8))
    data = b"".join(packer.compress(line) for _ in range(side)) + packer.flush()
    header = struct.pack(">IIBBBBB", side, side, 8 if colour else 1, colour, 0, 0, 0)
    file = b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header)
    if text:
        file += chunk(b"zTXt", b"Comment\x00\x00" + zlib.compress(bytes(text)))
    return file + chunk(b"IDAT", data) + chunk(b"IEND", b"")


def arithmetic() -> bytes:
    """A JPEG that says to be arithmetic-coded."""
    return encoded(PICTURE, "JPEG").replace(b"\xff\xc0", b"\xff\xc9", 1)


def odd_bmp() -> bytes:
    """A BMP that says to have two bits a pixel."""
    data = bytearray(encoded(PICTURE, "BMP"))
    data[28:30] = struct.pack("<H", 2)
    return bytes(data)


def black(side: int, kind: str, **options: Any) -> bytes:
    return encoded(Image.new("RGB", (side, side)), kind, **options)


def rows(*shape: int, value: float = 0.1) -> str:
    file = io.BytesIO()
    torch.save(torch.full(shape, value), file)
    return base64.b64encode(file.getvalue()).decode()


def by_embeds(value: object) -> dict[str, Any]:
    return {"type": "image_embeds", "image_embeds": value}


Part = dict[str, Any] | Callable[[], dict[str, Any]]
"""Of a message; what takes long to make is made by the test that sends it."""

BAD: dict[str, tuple[Part, str]] = {
    "bomb of 9000": (cache(lambda: by_data(bomb(9000))), "9000 x 9000 pixels; allowed: 40000000"),
    "bomb of 13000": (cache(lambda: by_data(bomb(13000))), "13000 x 13000 pixels; allowed"),
    "bomb of 9000 in colour": (cache(lambda: by_data(bomb(9000, 2))), "9000 x 9000 pixels"),
    "webp of 12000": (
        cache(lambda: by_data(black(12000, "WEBP", lossless=True))),
        "12000 x 12000 pixels; allowed",
    ),
    "a JPEG of many scans": (
        cache(lambda: by_data(many_scans((2800, 2800), 3000))),
        "in more than 81 scans",
    ),
    "runs of a BMP": (
        cache(lambda: by_data(run_lengths((2896, 2896), b"\1\5\0\0" * 2896))),
        "run lengths, 2896 x 2896 pixels",
    ),
    "bomb within the limit": (
        cache(lambda: by_data(bomb(6300))),
        "6300 x 6300 pixels, which take 454 MiB to decode; allowed for a file of this size: 96 MiB",
    ),
    "webp within the limit": (
        cache(lambda: by_data(black(6300, "WEBP", lossless=True))),
        "which take 757 MiB to decode",
    ),
    "bomb of 20000": (cache(lambda: by_data(bomb(20000))), "20000 x 20000 pixels"),
    "truncated png": (by_data(GOOD[: len(GOOD) // 2]), "image"),
    "damaged png": (by_data(damaged(GOOD)), "cannot be decoded"),
    "jpeg without its end": (
        by_data(encoded(PICTURE.resize((640, 480)), "JPEG")[:-900]),
        "cannot be decoded: image file is truncated",
    ),
    "truncated jpeg": (by_data(encoded(PICTURE, "JPEG")[:400]), "image"),
    "eps": (by_data(b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 9 9\n"), "PostScript"),
    "svg": (by_data(b"<svg xmlns='http://www.w3.org/2000/svg'/>"), "SVG"),
    "tiff": (by_data(encoded(PICTURE, "TIFF")), "TIFF"),
    "too thin": (by_data(encoded(Image.new("1", (1, 50_000)))), "is too thin: to resize it takes"),
    "arithmetic jpeg": (by_data(arithmetic()), "baseline and progressive JPEG are read"),
    "bmp of two bits": (by_data(odd_bmp()), "read are 1 to 32 bits"),
    "empty": (by_data(b""), "empty"),
    "no image": (by_data(bytes(range(200))), "no known format"),
    "too many bytes": (by_data(GOOD + bytes(MIB)), "allowed: 1048576"),
    "no base64": (by_url("data:image/png;base64,a*b"), "valid base64"),
    "long and no base64": (by_url("data:image/png;base64," + "QUJD" * 20_000 + "!"), "base64"),
    "no base64 said": (by_url("data:image/png,abc"), "must be in base64"),
    "no comma": (by_url("data:image/png;base64"), "data:TYPE;base64,DATA"),
    "http": (by_url("http://example.com/a.png"), "https and data: URLs"),
    "file": (by_url("file:///etc/hostname"), "--allowed-local-media-path"),
    "loopback": (by_url("https://127.0.0.1/a.png"), "cannot be fetched"),
    "mapped loopback": (by_url("https://[::ffff:127.0.0.1]/a.png"), "cannot be fetched"),
    "metadata of a cloud": (by_url("https://169.254.169.254/a"), "cannot be fetched"),
    "a password": (by_url("https://a:b@example.com/a.png"), "no plain host"),
    "no url": (by_url(None), "must be a string, a URL"),
    "a long url": (by_url("https://example.com/" + "a" * 9000), "characters; allowed"),
    "an empty url": (by_url(""), "must be a string, a URL"),
    "a number": (by_url(5), "got 5"),
    "a uuid alone": (
        {"type": "image_url", "image_url": None, "uuid": "u1"},
        "not kept by their uuid",
    ),
    "a uuid that is none": ({**by_data(GOOD), "uuid": 5}, "uuid must be a string"),
    "another detail": (
        {"type": "image_url", "image_url": {"url": "x", "detail": "most"}},
        "one of auto, low, high",
    ),
    "rows of half the width": (by_embeds(rows(ROWS, HIDDEN // 2)), "must be 64 wide"),
    "too few rows": (by_embeds(rows(ROWS - 4, HIDDEN)), "have 12 rows; this model's have 16"),
    "a grid where none is": (
        by_embeds({"image_embeds": rows(ROWS, HIDDEN), "image_grid_thw": [1, 80000, 80000]}),
        "take no image_grid_thw",
    ),
    "rows of NaN": (by_embeds(rows(ROWS, HIDDEN, value=float("nan"))), "finite"),
    "embeds that are none": (by_embeds("QUJD" * 100), "image_embeds"),
    "embeds that are null": (by_embeds(None), "null"),
    "embeds in a list": (by_embeds([1.0]), "base64"),
}


@contextmanager
def busy(client: openai.OpenAI, part: dict[str, Any]) -> Iterator[list[str]]:
    """Chats of a neighbour, one after another; their answers."""
    answers: list[str] = []
    over = threading.Event()

    def ask() -> None:
        while not over.is_set() or not answers:
            answers.append(good(client, part))

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        yield answers
    finally:
        over.set()
        thread.join()


def good(client: openai.OpenAI, part: dict[str, Any] | None = None) -> str:
    answer = chat(client, {"type": "text", "text": "the harbour town"}, part or by_data(GOOD))
    return str(answer.choices[0].message.content)


def made(part: Part) -> dict[str, Any]:
    return part() if callable(part) else part


def refused(
    server: Served,
    client: openai.OpenAI,
    given: Part,
    phrase: str,
    neighbour: dict[str, Any],
) -> None:
    """Assert that `given` is refused with its place and `phrase` while `neighbour` is answered."""
    part = made(given)
    expected = good(client, neighbour)
    with (
        busy(client, neighbour) as answers,
        hardly_growing(server),
        pytest.raises(openai.BadRequestError) as caught,
    ):
        chat(client, {"type": "text", "text": "What is"}, part)
    found = caught.value.body
    assert isinstance(found, dict)
    assert phrase in found["message"], found
    assert len(found["message"]) < 400
    # Where a worker finds the fault, too.
    assert found["param"].startswith("messages[0].content[1]"), found
    assert found["message"].startswith("messages[0].content[1]"), found
    assert set(answers) == {expected}


@contextmanager
def hardly_growing(server: Served) -> Iterator[None]:
    """Assert that the server and its engine process take less than 100 MiB more at any time."""
    first = psutil.Process(server.process.pid)
    processes = [first, *first.children(recursive=True)]
    with peak_growth(*(process.pid for process in processes)) as grown:
        yield
    assert grown[0] < 100 * MIB


@pytest.mark.parametrize("name", list(BAD))
def test_a_bad_image_is_a_precise_error_beside_neighbours_that_are_not(
    server: Served, client: openai.OpenAI, name: str
) -> None:
    part, phrase = BAD[name]
    refused(server, client, part, phrase, by_data(GOOD))


LEVELS = np.linspace(0, 65535, 1600, dtype=np.uint16).reshape(40, 40)
PRINTED = PICTURE.convert("CMYK")
VEIL = np.tile(np.linspace(0, 255, 50, dtype=np.uint8), (40, 1))
VEILED = PICTURE.convert("RGBA")
VEILED.putalpha(Image.fromarray(VEIL))
LARGE = [Image.new("RGB", (1000, 1000), (8 * index, 90, 30)) for index in range(30)]
_PAPER = Image.new("RGBA", PICTURE.size, "white")

FINE: dict[str, tuple[Callable[[], bytes], Image.Image]] = {
    "animated": (
        lambda: encoded(
            PICTURE, "GIF", save_all=True, append_images=[PICTURE.rotate(90)] * 3, duration=40
        ),
        Image.open(io.BytesIO(encoded(PICTURE, "GIF"))).convert("RGB"),
    ),
    "30 large frames": (
        lambda: encoded(LARGE[0], "GIF", save_all=True, append_images=LARGE[1:], duration=40),
        LARGE[0],
    ),
    "16 bits": (
        lambda: encoded(Image.fromarray(LEVELS)),
        Image.fromarray((LEVELS // 257).astype(np.uint8)).convert("RGB"),
    ),
    "CMYK": (
        lambda: encoded(PRINTED, "JPEG", quality=95),
        Image.open(io.BytesIO(encoded(PRINTED, "JPEG", quality=95))).convert("RGB"),
    ),
    "alpha": (
        lambda: encoded(VEILED),
        Image.alpha_composite(_PAPER, VEILED).convert("RGB"),
    ),
    "webp": (lambda: encoded(PICTURE, "WEBP", lossless=True), PICTURE),
    "turned": (
        lambda: encoded(PICTURE, exif=turned_left()),
        PICTURE.transpose(Image.Transpose.ROTATE_270),
    ),
    "80 MB of text in 80 KB": (
        lambda: bomb(50, text=80 * MIB),
        Image.new("RGB", (50, 50)),
    ),
    "one bit, 8 megapixels": (lambda: bomb(2896), Image.new("RGB", (2896, 2896))),
    "webp of 5 megapixels": (
        lambda: black(2240, "WEBP", lossless=True),
        Image.new("RGB", (2240, 2240)),
    ),
}
"""Files, and what is to be seen in them."""


def turned_left() -> Image.Exif:
    exif = Image.Exif()
    exif[0x0112] = 6
    return exif


def likely(client: openai.OpenAI, data: bytes) -> list[tuple[str, float]]:
    """Tokens that a chat about an image has, and how likely they were."""
    answer = chat(client, by_data(data), logprobs=True, top_logprobs=5)
    return [
        (other.token, other.logprob)
        for choice in answer.choices[0].logprobs.content
        for other in choice.top_logprobs
    ]


@pytest.mark.parametrize("name", list(FINE))
def test_odd_files_that_are_images_are_seen_as_they_are(
    server: Served, client: openai.OpenAI, name: str
) -> None:
    made, seen = FINE[name]
    data = made()
    with hardly_growing(server):
        found = likely(client, data)
    # The same pixels, encoded and in a prompt of their own.
    wanted = likely(client, encoded(seen))
    assert [token for token, _ in found] == [token for token, _ in wanted]
    assert np.allclose([value for _, value in found], [value for _, value in wanted], atol=1e-5)
    assert found != likely(client, GOOD) or name == "webp"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("family", "bad", "phrase"),
    [
        ("mistral3", by_data(encoded(Image.new("1", (1, 6_000)))), "is too small to be seen"),
        (
            "smolvlm",
            by_embeds({"image_embeds": rows(36, HIDDEN), "image_grid_thw": [1, 1, 8]}),
            "lines have names",
        ),
    ],
)
def test_a_shape_that_a_family_has_no_layout_for_is_refused(
    family: str, bad: Part, phrase: str
) -> None:
    with (
        serving(vision(family), "--served-model-name", "m", "--enable-mm-embeds") as served,
        openai.OpenAI(base_url=served.v1, api_key="unused", max_retries=0) as client,
    ):
        refused(served, client, bad, phrase, by_data(GOOD))


def test_more_images_than_allowed_are_refused(client: openai.OpenAI) -> None:
    assert chat(client, *[by_data(GOOD)] * 2)
    with pytest.raises(openai.BadRequestError, match=r"at most 2 image\(s\).*got 3"):
        chat(client, *[by_data(GOOD)] * 3)


def test_a_host_that_never_answers_is_given_up(client: openai.OpenAI, quiet_port: int) -> None:
    with pytest.raises(openai.BadRequestError, match="answers 200 within 1 s"):
        chat(client, by_url(f"https://127.0.0.2:{quiet_port}/a.png"))


def test_features_that_need_ids_say_so(client: openai.OpenAI, server: Served) -> None:
    with pytest.raises(openai.BadRequestError, match="prompt_logprobs is not compatible"):
        chat(client, by_data(GOOD), extra_body={"prompt_logprobs": 1})
    parts: Any = [{"type": "text", "text": "It is"}, by_data(GOOD)]
    with pytest.raises(openai.BadRequestError, match="echo is not compatible"):
        client.completions.create(model="m", prompt=parts, echo=True, max_tokens=1)
    message = {"role": "user", "content": [by_data(GOOD)]}
    with pytest.raises(openai.BadRequestError, match="no tokens to show"):
        client.post(
            server.url + "/tokenize",
            body={"model": "m", "messages": [message]},
            cast_to=object,
        )


def test_too_long_an_image_is_refused_before_any_engine(client: openai.OpenAI) -> None:
    with pytest.raises(openai.BadRequestError, match="maximum context length"):
        chat(client, {"type": "text", "text": "lanterns " * 490}, by_data(GOOD))


@pytest.fixture(scope="module")
def text_model() -> Path:
    return tiny("llama")


@pytest.mark.thorough
def test_a_text_model_takes_no_image(text_model: Path) -> None:
    with (
        serving(text_model, "--served-model-name", "words") as served,
        openai.OpenAI(base_url=served.v1, api_key="unused", max_retries=0) as client,
        pytest.raises(openai.BadRequestError) as caught,
    ):
        chat(client, by_data(GOOD), model="words")
    assert caught.value.body == {
        "message": "messages[0].content[0]: the model `words` takes no images",
        "type": "invalid_request_error",
        "param": "messages[0].content[0]",
        "code": None,
    }
