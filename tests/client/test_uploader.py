"""Large rows are sent once: uploads over real HTTP, with the real `openai` client behind them."""

import io
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from inlay.base.errors import (
    AuthenticationError,
    BodyTooLargeError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from inlay.cli import main
from inlay.client import EmbeddedPrompt, PromptEmbedder, Uploader
from inlay.store import PromptStore
from tests.live import SECRET, Fleet, fleet
from tests.models import tiny

TEXT = "the harbour town counts its lanterns every night"


@pytest.fixture(scope="module")
def servers() -> Iterator[Fleet]:
    with fleet(tiny("llama")) as running:
        yield running


class Clock:
    """A clock that is set by hand."""

    now = 1_000_000.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def store(clock: Clock) -> PromptStore:
    return PromptStore(SECRET, memory_bytes=1 << 26, ttl=100.0, clock=clock)


@pytest.fixture
def url(servers: Fleet, store: PromptStore) -> str:
    return servers.serve(enable_prompt_embeds=True, store=store, api_key=["a"]) + "/v1"


@pytest.fixture
def uploader(url: str) -> Uploader:
    return Uploader(url, "a", upload_from=1000)


@pytest.fixture
def client(url: str) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=url, api_key="a", max_retries=0) as client:
        yield client


def prompt(seed: int = 0, rows: int = 20) -> EmbeddedPrompt:
    return EmbeddedPrompt(
        np.random.default_rng(seed).standard_normal((rows, 48)).astype(np.float32)
    )


def answer(client: openai.OpenAI, arguments: dict[str, Any]) -> str:
    text: str = (
        client.completions.create(model="tiny", temperature=0, max_tokens=12, **arguments)
        .choices[0]
        .text
    )
    return text


def test_large_rows_go_by_reference_and_answer_as_by_value(
    uploader: Uploader, client: openai.OpenAI, store: PromptStore
) -> None:
    embedder = PromptEmbedder.from_pretrained(tiny("llama"))
    text = answer(client, {"prompt": TEXT})
    by_reference = embedder.completion_args(TEXT, uploader=uploader)
    assert set(by_reference["extra_body"]["prompt_embeds"]) == {"ref"}
    assert answer(client, by_reference) == text
    assert embedder.completion_args(TEXT, uploader=uploader) == by_reference
    assert store.stats().count == 1
    part = embedder.chat_part(TEXT, uploader=uploader)
    assert set(part) == {"type", "ref"}
    messages: Any = [
        [{"role": "user", "content": [content]}] for content in (part, embedder.chat_part(TEXT))
    ]
    first, second = (
        client.chat.completions.create(
            model="tiny", messages=each, temperature=0, max_tokens=12
        ).choices[0]
        for each in messages
    )
    assert first.message.content == second.message.content


def test_small_rows_go_by_value(uploader: Uploader, store: PromptStore) -> None:
    small = prompt(rows=1)
    assert small.completion_args(uploader=uploader) == small.completion_args()
    assert store.stats().count == 0


def test_what_has_expired_is_uploaded_again(
    uploader: Uploader, store: PromptStore, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = uploader.ref(prompt().to_bytes())
    clock.now += 101
    assert store.sweep() == 1
    monkeypatch.setattr("inlay.client.uploader.FRESH_SECONDS", 0.0)
    assert uploader.ref(prompt().to_bytes()) == first
    assert store.stats().count == 1
    assert uploader.ref(prompt().to_bytes()) == first


def test_a_request_whose_reference_is_gone_is_made_again(
    uploader: Uploader, client: openai.OpenAI, store: PromptStore, clock: Clock
) -> None:
    rows = prompt(1)
    want = answer(client, rows.completion_args())
    assert answer(client, rows.completion_args(uploader=uploader)) == want
    clock.now += 101
    with pytest.raises(openai.NotFoundError):
        answer(client, rows.completion_args(uploader=uploader))
    assert (
        uploader.retrying(lambda: answer(client, rows.completion_args(uploader=uploader))) == want
    )
    tries = []

    def unknown_model() -> None:
        tries.append(1)
        client.completions.create(model="nobody", prompt="a")

    with pytest.raises(openai.NotFoundError):
        uploader.retrying(unknown_model)
    assert len(tries) == 1


def test_the_server_says_why_not(url: str, uploader: Uploader) -> None:
    with pytest.raises(InvalidRequestError, match=r"must be a torch\.Tensor"):
        uploader.upload(b"x" * 200)
    with pytest.raises(InvalidRequestError, match="size of tensor must match"):
        uploader.upload(EmbeddedPrompt(np.ones((4, 32), np.float32)).to_bytes(), model="tiny")
    with pytest.raises(AuthenticationError):
        Uploader(url, "b").upload(prompt().to_bytes())
    with pytest.raises(NotFoundError):
        uploader.get("pe-none")
    with pytest.raises(OverloadedError, match="cannot be reached"):
        Uploader("http://127.0.0.1:9/v1", max_retries=0).upload(b"x" * 200)
    with pytest.raises(InvalidRequestError, match="URL"):
        Uploader("127.0.0.1:8000")


def test_pins_and_deletion(uploader: Uploader, store: PromptStore) -> None:
    stored = uploader.upload(prompt(2).to_bytes())
    assert stored.expires_at == 1_000_100
    assert uploader.pin(stored.id).pinned
    assert uploader.get(stored.id).expires_at is None
    assert not uploader.pin(stored.id, False).pinned
    uploader.delete(stored.id)
    assert store.stats().count == 0


def test_the_command_prints_the_id(url: str, uploader: Uploader, tmp_path: Path) -> None:
    path = tmp_path / "prompt.b64"
    path.write_text(prompt(3).to_base64(), encoding="ascii")
    command = [
        sys.executable,
        "-m",
        "inlay.cli",
        "embeds",
        "upload",
        str(path),
        "--url",
        url,
        "--api-key",
        "a",
    ]

    def run(*more: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([*command, *more], capture_output=True, text=True, timeout=180)

    plain = run()
    assert (plain.returncode, plain.stdout.strip()) == (0, uploader.upload(prompt(3).to_bytes()).id)
    assert '"pinned":true' in run("--pin", "--output-json").stdout
    refused = run("--model", "nobody")
    assert refused.returncode == 1
    assert "does not exist" in refused.stderr
    assert "Traceback" not in refused.stderr


def saved(rows: object) -> bytes:
    file = io.BytesIO()
    np.save(file, np.asarray(rows))
    return file.getvalue()


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"no tensor " * 30, "rows: must be a torch.Tensor"),
        (b"short", "rows: decoded data must be at least 100 bytes, got 5 bytes"),
        (saved(np.full((3, 48), np.nan, np.float32)), "rows: must be finite: row 0"),
        (saved(np.ones((3, 64), np.float32)), "rows: size of tensor must match"),
        (saved(np.ones((3, 48), np.int64)), "rows: must be a torch.Tensor"),
        (b"\x89PNG\r\n\x1a\n" + b"\0" * 200, "rows: "),
    ],
)
def test_the_command_names_a_file_that_is_refused(
    data: bytes, said: str, url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows"
    path.write_bytes(data)
    words = ["embeds", "upload", str(path), "--url", url, "--api-key", "a", "--model", "tiny"]
    assert main(words, {}) == 1
    error = capsys.readouterr().err
    assert f"inlay embeds upload: {tmp_path}/{said}" in error
    assert error.count("\n") == 1


def test_a_file_that_is_too_large_is_not_read_and_a_closed_connection_says_why(
    servers: Fleet, store: PromptStore, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    huge = tmp_path / "huge.safetensors"
    with huge.open("wb") as file:
        file.truncate(2 << 30)
    assert main(["embeds", "upload", str(huge), "--url", "http://127.0.0.1:9/v1"], {}) == 2
    assert f"{huge}: 2147483648 bytes; up to 1073741824 can be sent" in capsys.readouterr().err
    small = servers.serve(enable_prompt_embeds=True, store=store, max_body_bytes=1 << 20) + "/v1"
    large = prompt(rows=1 << 17).to_bytes()
    with pytest.raises((BodyTooLargeError, OverloadedError)) as failed:
        Uploader(small, max_retries=0).upload(large)
    said = str(failed.value)
    assert "over the limit of 1048576 bytes" in said or "it may take fewer (max_body_bytes" in said
