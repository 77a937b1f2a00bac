"""`inlay chat`: one question, and a chat in a terminal."""

import asyncio
import io
import json
import stat
import subprocess
import sys
import time
from pathlib import Path

import httpx
import numpy as np
import pytest

from inlay.cli import main
from inlay.cli.process import Console
from inlay.client import EmbeddedPrompt, PromptEmbedder, Uploader
from inlay_tools.chat.answer import ChatReply
from inlay_tools.chat.conversation import Transcript
from inlay_tools.chat.screen import Interrupts, Screen
from inlay_tools.chat.session import Session
from inlay_tools.http_client import HttpClient, RemoteServer
from inlay_tools.settings import ChatSettings
from tests.cli.terminals import terminal
from tests.live import Fleet
from tests.models import tiny

pytestmark = pytest.mark.extensions("tools")

TEXT = "the harbour town counts"


def v1(url: str) -> str:
    return url + "/v1"


def asked(url: str, content: object, **more: object) -> str:
    body = {"model": "tiny", "messages": [{"role": "user", "content": content}], **more}
    answer = httpx.post(f"{url}/v1/chat/completions", json=body, timeout=60)
    text: str = answer.raise_for_status().json()["choices"][0]["message"]["content"]
    return text


def one_line(capsys: pytest.CaptureFixture[str], *words: str, status: int) -> str:
    assert main(["chat", *words], {}) == status
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err.count("\n") == 1
    return captured.err


GREEDY = ("--temperature", "0", "--max-tokens", "12")


def test_one_question_gets_the_answer_that_the_api_gives(
    url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["chat", "--url", v1(url), "--once", TEXT, *GREEDY], {}) == 0
    out = capsys.readouterr().out
    # A URL without a path means the API below it.
    assert main(["chat", "--url", url, "--once", TEXT, *GREEDY], {}) == 0
    assert capsys.readouterr().out == out
    assert out.rstrip("\n") == asked(url, TEXT, temperature=0, max_tokens=12).rstrip("\n")
    assert out.endswith("\n")


def test_standard_input_that_is_no_terminal_is_one_question(
    url: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = asked(url, f"{TEXT}\nand more", temperature=0, max_tokens=12)
    for words in ([], ["--once", "-"]):
        monkeypatch.setattr(
            sys, "stdin", io.TextIOWrapper(io.BytesIO(f"{TEXT}\nand more\n".encode()))
        )
        assert main(["chat", "--url", v1(url), "-o", "json", *GREEDY, *words], {}) == 0
        said = json.loads(capsys.readouterr().out)
        assert said["content"] == expected
        assert said["usage"]["completion_tokens"] <= 12
        assert said["finish_reason"] in ("stop", "length")
        assert said["model"] == "tiny"


def test_embeddings_get_the_answer_of_the_text_they_were_made_from(
    url: str, llama: Fleet, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = PromptEmbedder.from_pretrained(llama.path).embed(TEXT, add_special_tokens=False)
    path = tmp_path / "rows.safetensors"
    path.write_bytes(rows.to_bytes())
    words = ["chat", "--url", v1(url), "--embeds", str(path), "--once", " every night", *GREEDY]
    assert main(words, {}) == 0
    captured = capsys.readouterr()
    expected = asked(url, f"{TEXT} every night", temperature=0, max_tokens=12)
    assert captured.out.rstrip("\n") == expected.rstrip("\n")
    assert f"attached rows.safetensors: {rows.num_tokens} rows of 48" in captured.err


@pytest.mark.parametrize(
    ("words", "said", "status"),
    [
        (["--url", "ftp://x", "--once", "a"], "is not the URL of a server", 1),
        (["--url", "http://127.0.0.1:9/v1", "--once", "a"], "cannot be reached", 1),
        (["m", "--url", "http://x/v1"], "the name of a model at a server is --model-name", 2),
        (["--once", "a", "--", "--dtype", "bfloat16"], "options of inlay serve, and need MODEL", 2),
        (["--once", "a", "--temperature", "hot"], "--temperature: must be a number", 2),
    ],
)
def test_words_that_make_no_sense_are_one_line(
    words: list[str], said: str, status: int, capsys: pytest.CaptureFixture[str]
) -> None:
    assert said in one_line(capsys, *words, status=status)


def test_what_the_server_or_a_file_refuses_is_one_line(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    at = ["--url", v1(url), "--once", "a"]
    error = one_line(capsys, *at, "--model-name", "other", status=1)
    assert "the model 'other' does not exist; served: tiny, org/tiny" in error
    nothing = tmp_path / "notes.txt"
    nothing.write_text("no tensor " * 20)
    error = one_line(capsys, *at, "--embeds", str(nothing), status=1)
    assert "neither a picture (PNG" in error
    error = one_line(capsys, *at, "--embeds", str(tmp_path / "gone"), status=2)
    assert "gone: No such file" in error
    large = tmp_path / "large"
    with large.open("wb") as file:
        file.truncate(2 << 30)
    assert "2147483648 bytes" in one_line(capsys, *at, "--embeds", str(large), status=2)
    batch = tmp_path / "batch.npy"
    np.save(batch, np.ones((2, 3, 48), np.float32))
    assert "holds 2 prompts" in one_line(capsys, *at, "--embeds", str(batch), status=1)
    wide = tmp_path / "wide.npy"
    np.save(wide, np.ones((3, 64), np.float32))
    assert main(["chat", *at, "--embeds", str(wide)], {}) == 1
    assert "size of tensor must match" in capsys.readouterr().err


def test_a_key_is_asked_for_and_sent_where_it_belongs(
    llama: Fleet, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    locked = v1(llama.serve(api_key=["sesame"]))
    assert "API key" in one_line(capsys, "--url", locked, "--once", "a", status=1)
    assert main(["chat", "--url", locked, "--api-key", "sesame", "--once", "a", *GREEDY], {}) == 0
    capsys.readouterr()
    monkeypatch.setenv("OPENAI_API_KEY", "sesame")
    one_line(capsys, "--url", locked, "--once", "a", status=1)
    monkeypatch.setenv("OPENAI_BASE_URL", locked)
    assert main(["chat", "--once", "a", *GREEDY], {}) == 0


def test_a_reader_that_leaves_early_is_no_traceback(endless_url: str) -> None:
    process = subprocess.Popen(
        [sys.executable, "-m", "inlay.cli", "chat", "--url", v1(endless_url), "--once", TEXT],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    )
    assert process.stdout is not None
    assert process.stderr is not None
    assert process.stdout.read(20)
    process.stdout.close()
    assert process.wait(120) == 141
    assert process.stderr.read() == b""
    process.stderr.close()


def test_control_characters_of_a_model_are_shown_on_a_terminal_and_kept_in_a_pipe() -> None:
    for on_terminal, expected in ((True, "a\\x1b]0;x\\x07\tb\n"), (False, "a\x1b]0;x\x07\tb\n")):
        out = io.StringIO()
        Screen(Console(out, io.StringIO()), terminal=on_terminal).text("a\x1b]0;x\x07\tb\n")
        assert out.getvalue() == expected


@pytest.mark.parametrize("plain", [False, True])
def test_reasoning_is_dim_unless_colour_is_not_wanted(
    plain: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm")
    if plain:
        monkeypatch.setenv("NO_COLOR", "1")
    out = io.StringIO()
    Screen(Console(out, io.StringIO()), terminal=True).aside("hm")
    assert out.getvalue() == ("hm" if plain else "\x1b[2mhm\x1b[0m")


@pytest.mark.parametrize("width", [20, 100])
def test_a_chat_in_a_terminal(url: str, llama: Fleet, tmp_path: Path, width: int) -> None:
    rows = tmp_path / "rows.safetensors"
    prompt = PromptEmbedder.from_pretrained(llama.path).embed(TEXT)
    rows.write_bytes(prompt.to_bytes())
    state = tmp_path / "of"
    with terminal(
        *("chat", "--url", v1(url), *GREEDY),
        width=width,
        environment={"XDG_STATE_HOME": str(state)},
    ) as screen:
        screen.until("Ctrl-D ends\r\n> ")
        screen.type("/help\n")
        screen.until("/attach FILE")
        screen.until("> ")
        screen.type("/atach x\n")
        screen.until("did you mean /attach")
        screen.until("> ")
        screen.type(f"/attach {rows}\n")
        screen.until(f"attached rows.safetensors: {prompt.num_tokens} rows of 48")
        screen.until("> ")
        screen.type("/rows\n")
        screen.until("norms ")
        screen.until("> ")
        screen.type('"""one\n')
        screen.until(r"\. ")
        screen.type('two"""\n')
        screen.until("two")
        screen.until("> ")
        screen.type("/bye\n")
        assert screen.ended() == 0
    history = state / "inlay" / "chat_history"
    assert "/attach" in history.read_text()
    assert stat.S_IMODE(history.stat().st_mode) == 0o600


def test_ctrl_c_ends_the_answer_and_not_the_chat(endless_url: str) -> None:
    with terminal("chat", "--url", v1(endless_url), "--no-history") as screen:
        screen.until("> $")
        for _ in range(2):
            screen.type(f"{TEXT}\n")
            screen.until(f"{TEXT}\r\n")
            screen.until(r"[a-z]{3}")
            screen.press_until("\x03", r"stopped\r\n> ")
        screen.press_until("\x03", "Ctrl-D ends the chat")
        screen.until("> ")
        screen.type("\x04")
        assert screen.ended() == 0


@pytest.mark.slow
@pytest.mark.parametrize("pause", [0, 0.002, 0.01, 0.03])
def test_ctrl_c_pressed_many_times_ends_the_answer_once(pause: float, endless_url: str) -> None:
    with terminal("chat", "--url", v1(endless_url), "--no-history") as screen:
        screen.until("> $")
        screen.type(f"{TEXT}\n")
        screen.until(f"{TEXT}\r\n")
        screen.until(r"[a-z]{3}")
        for _ in range(8):
            screen.type("\x03")
            time.sleep(pause)
        screen.until(r"stopped\r\n(?s:.)*> ")
        # Keys that came after the answer had ended were answered by the prompt, one after another:
        # a line that is typed before the last of them is dropped with it.
        screen.press_until("\x03", "Ctrl-D ends the chat\r\n> $")
        screen.press_until(f"{TEXT}\n", f"{TEXT}\r\n(?s:.)*[a-z]{{3}}")
        assert screen.process.poll() is None


def test_a_second_ctrl_c_within_the_first_is_one_interruption() -> None:
    # CPython's `input` can run a handler while the exception of the one before it is set.
    with pytest.raises(KeyboardInterrupt), Interrupts() as interrupts, interrupts.typing():
        raise SystemError from KeyboardInterrupt()
    with pytest.raises(SystemError), Interrupts() as interrupts, interrupts.typing():
        raise SystemError


def test_messages_after_an_error_begin_where_the_last_answer_ended(
    url: str, tmp_path: Path
) -> None:
    """What the server refuses is not said again with the next message."""
    wide = tmp_path / "wide.npy"
    np.save(wide, np.ones((3, 64), np.float32))
    with terminal("chat", "--url", v1(url), "--no-history", *GREEDY) as screen:
        screen.until("> $")
        screen.type(f"/attach {wide}\n")
        screen.until("64, float32")
        screen.until("> ")
        screen.type("hello\n")
        screen.until("size of tensor must match")
        screen.until("> ")
        screen.type("/clear\n")
        screen.until("forgotten")
        screen.until("> ")
        screen.type("hello\n")
        screen.until("hello\r\n")
        shown = screen.until("\r\n> ")
        assert "size of tensor" not in shown
        screen.type("/bye\n")
        assert screen.ended() == 0


@pytest.mark.slow
def test_a_model_that_nobody_serves_is_served_while_the_chat_lasts(
    capfd: pytest.CaptureFixture[str],
) -> None:
    model = str(tiny("llama"))
    words = ["chat", model, "--once", TEXT, *GREEDY, "--", "--engine", "echo"]
    assert main(words, {}) == 0
    captured = capfd.readouterr()
    assert "user" in captured.out
    assert " at http://127.0.0.1:" in captured.err
    assert main(["chat", "/nowhere/model", "--once", "a"], {}) == 1
    assert "the server did not start" in capfd.readouterr().err


def test_rows_that_the_server_forgot_are_uploaded_again(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    from inlay.client import Uploader

    rows = np.random.default_rng(0).normal(0, 0.02, (400, 48)).astype(np.float32)
    path = tmp_path / "rows"
    path.write_bytes(EmbeddedPrompt(rows).to_bytes())
    real = Uploader.ref
    refs: list[str] = []

    def forgotten_once(self: Uploader, data: bytes) -> str:
        """The reference, of which the server forgets the first right after it was given."""
        refs.append(real(self, data))
        if len(refs) == 1:
            self.delete(refs[0])
        return refs[-1]

    monkeypatch.setattr(Uploader, "ref", forgotten_once)
    words = ["chat", "--url", v1(url), "--embeds", str(path), "--once", "a", *GREEDY]
    assert main(words, {}) == 0
    assert len(refs) == 2
    assert capsys.readouterr().out.strip()


def test_ctrl_c_takes_effect_within_what_has_come_at_once() -> None:
    event = b'data: {"choices": [{"index": 0, "delta": {"content": "word "}}]}\n\n'
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\n\r\n"

    async def served(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(head + 500 * event)
        # Until the client hangs up.
        await reader.read()
        writer.close()
        hung_up.set()

    asking: asyncio.Task[None] | None = None
    hung_up = asyncio.Event()

    class Impatient(Screen):
        def text(self, text: str) -> None:
            super().text(text)
            if asking is not None:
                asking.cancel()

    async def ask() -> None:
        nonlocal asking
        server = await asyncio.start_server(served, "127.0.0.1", 0)
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}/v1"
        client = HttpClient(RemoteServer(url))
        conversation = Transcript(ChatSettings(), "tiny")
        session = Session(conversation, client, Uploader(url), screen)
        asking = asyncio.create_task(session.answer("hello", ChatReply()))
        with pytest.raises(asyncio.CancelledError):
            await asking
        await client.close()
        await hung_up.wait()
        server.close()

    out = io.StringIO()
    screen = Impatient(Console(out, io.StringIO()), terminal=False)
    asyncio.run(ask())
    assert 1 <= out.getvalue().count("word") <= 2
