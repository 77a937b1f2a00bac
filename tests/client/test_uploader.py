"""Large rows are sent once: uploads over real HTTP, with the real `openai` client behind them."""

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from inlay.client import EmbeddedPrompt, PromptEmbedder, Uploader
from inlay.errors import AuthenticationError, InvalidRequestError, NotFoundError, OverloadedError
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
