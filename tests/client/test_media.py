"""Images by the Python client: files, references and rows, over real HTTP."""

import base64
import io
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest
from PIL import Image

from inlay.base.errors import EmbeddingsError, InvalidRequestError, NotFoundError
from inlay.cli import main
from inlay.client import (
    EmbeddedMedia,
    MediaEncoder,
    PromptEmbedder,
    StoredImage,
    Uploader,
    image_part,
    load_media,
)
from inlay.media.families import spec_of
from inlay.media.spec import layout
from tests.engine.torch.encode_reference import damaged, features
from tests.engine.torch.vision_reference import Picture
from tests.equality.test_images_over_http import FLAGS, chat, directory, expected, ids_of, text
from tests.serving import Served, serving

FAMILY = "qwen2_5_vl"
ONE = Picture(3, 50, 60)


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(directory(FAMILY), *FLAGS) as served:
        yield served


@pytest.fixture
def client(server: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=server.v1, api_key="unused", max_retries=0) as client:
        yield client


@pytest.fixture
def path(tmp_path: Path) -> Path:
    path = tmp_path / "picture.png"
    path.write_bytes(ONE.data)
    return path


def test_every_way_of_sending_an_image_is_the_image(
    server: Served, client: openai.OpenAI, path: Path
) -> None:
    embedder = PromptEmbedder.from_pretrained(directory(FAMILY))
    uploader = Uploader(server.v1, upload_from=1000)
    parts = [
        embedder.image_part(path),
        embedder.image_part(ONE.data, uploader=uploader),
        embedder.image_part(str(path), encoder=MediaEncoder(server.v1, model="m")),
    ]
    assert [set(part) - {"type"} for part in parts] == [{"image_url"}, {"ref"}, {"image_embeds"}]
    for part in parts:
        answer = chat(client, part, text("It is"), embedder.chat_part(" a town"))
        assert ids_of(answer) == expected(FAMILY, ONE, "It is", " a town")
    assert image_part(path, uploader=Uploader(server.v1))["image_url"]  # small ones go by value
    assert image_part(path, detail="low")["image_url"]["detail"] == "low"


def test_an_uploaded_image_is_described_pinned_and_deleted(server: Served) -> None:
    uploader = Uploader(server.v1)
    stored = uploader.upload_media(ONE.data, model="m")
    assert (stored.format, stored.width, stored.height) == ("PNG", 60, 50)
    assert stored.num_tokens is not None
    assert stored.num_tokens > 1
    found = uploader.get(stored.id)
    assert isinstance(found, StoredImage)
    assert uploader.pin(stored.id).pinned
    uploader.delete(stored.id)
    with pytest.raises(NotFoundError):
        uploader.get(stored.id)
    with pytest.raises(InvalidRequestError, match="formats that are read: PNG"):
        uploader.upload_media(b"%!PS-Adobe")


def test_rows_and_their_grid_are_kept_in_a_file(tmp_path: Path) -> None:
    rows = np.random.default_rng(1).standard_normal((20, 64)).astype(np.float32)
    image = EmbeddedMedia(rows, (1, 8, 10))
    path = tmp_path / "image.safetensors"
    path.write_bytes(image.to_bytes())
    found = load_media(path)
    np.testing.assert_array_equal(found.rows, rows)
    assert found.grid == (1, 8, 10)
    with pytest.raises(EmbeddingsError, match="torch has no place for the grid"):
        image.to_bytes("torch")
    plain = EmbeddedMedia(rows)
    assert plain.to_bytes("torch")
    assert isinstance(plain.chat_part()["image_embeds"], str)


@pytest.mark.parametrize("by", ["url", "model"])
def test_the_command_writes_a_file_that_is_the_image(
    server: Served, client: openai.OpenAI, path: Path, tmp_path: Path, by: str
) -> None:
    there = tmp_path / "image.safetensors"
    how = ["--url", server.v1] if by == "url" else ["--model", str(directory(FAMILY))]
    assert main(["embeds", "encode", "--image", str(path), *how, "--output", str(there)], {}) == 0
    image = load_media(there)
    truth = features(FAMILY, ONE).rows.numpy()
    np.testing.assert_allclose(image.rows, truth, atol=2e-5, rtol=1e-4)
    assert ids_of(chat(client, image.chat_part(), text("It is"))) == expected(FAMILY, ONE, "It is")
    # The grid is in the file, so that the file alone is enough.
    plain: Any = {
        "type": "image_embeds",
        "image_embeds": base64.b64encode(there.read_bytes()).decode(),
    }
    assert ids_of(chat(client, plain, text("It is"))) == expected(FAMILY, ONE, "It is")


@pytest.mark.parametrize("family", ["mistral3", "smolvlm"])
def test_the_file_of_an_image_with_tokens_between_its_rows_has_their_grid(
    family: str, path: Path, tmp_path: Path
) -> None:
    there, model = tmp_path / "image.safetensors", directory(family)
    words = ["embeds", "encode", "--image", str(path), "--model", str(model)]
    assert main([*words, "--output", str(there)], {}) == 0
    spec = spec_of(model)
    assert spec is not None
    image, laid = load_media(there), layout(spec, ONE.height, ONE.width)
    assert image.num_tokens == laid.rows < laid.positions
    assert image.grid == laid.given_grid


def test_a_damaged_image_is_said_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "damaged.png"
    path.write_bytes(damaged(ONE.data))
    words = ["embeds", "encode", "--image", str(path), "--model", str(directory(FAMILY))]
    assert main([*words, "--base64"], {}) != 0
    error = capsys.readouterr().err
    assert "an image cannot be decoded" in error
    assert "Traceback" not in error


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["--image", "PATH"], "--url URL, or here, --model DIRECTORY"),
        (["--image", "PATH", "--text", "x", "--model", "m"], "--text and --image"),
        # Of text the server is not asked: INLAY_URL may be set for other commands.
        (["--text", "x", "--url", "http://127.0.0.1:1/v1"], "--model is missing"),
        (["--audio", "PATH", "--detail", "low"], "--detail is for an --image"),
        (["--text", "x"], "--model is missing"),
        (["--image", "PATH", "--url", "http://127.0.0.1:1/v1"], "cannot be reached"),
    ],
)
def test_what_contradicts_itself_is_said_in_one_line(
    path: Path, words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = [str(path) if word == "PATH" else word for word in words]
    assert main(["embeds", "encode", *given, "--base64"], {}) != 0
    error = capsys.readouterr().err
    assert said in error
    assert "Traceback" not in error


def test_the_upload_command_takes_an_image(
    server: Served, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = io.BytesIO()
    Image.new("RGB", (40, 30), "red").save(file, "JPEG")
    path = tmp_path / "red.jpg"
    path.write_bytes(file.getvalue())
    assert main(["embeds", "upload", str(path), "--url", server.v1, "--model", "m"], {}) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("pe-")
    assert "JPEG, 40 x 30" in captured.err
    assert "positions" in captured.err
