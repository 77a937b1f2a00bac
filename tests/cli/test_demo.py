"""`inlay demo`: what it shows is right, and what it prints to be pasted works."""

import io
import json
import os
import re
import shlex
import shutil
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
from scripts.demo_training import audit_texts
from scripts.demo_training.world import build_world

from inlay import demo
from inlay.cli import demo as demo_command
from inlay.cli.demo import inputs_shown, question_shown
from inlay.cli.process import Console
from inlay.cli.settings import DemoSettings
from inlay.engine.extension_options import check_loaded
from inlay.extension import VARIABLE
from tests import preloaded
from tests.commands import run
from tests.serving import free_port

START_SECONDS = 180


PYTHON = "python" if shutil.which("python") == sys.executable else shlex.quote(sys.executable)
SNIPPETS = ("curl", "embeds=", "# What is in", "# Does the model", f"{PYTHON} - <<")
"""Beginnings of the printed snippets."""


@dataclass(frozen=True)
class Shown:
    """Output of a demo that still serves."""

    text: str
    url: str

    def snippet(self, begin: str) -> str:
        """The printed snippet that begins with `begin`."""
        shown = self.text[self.text.index("Try it:") :]
        start = shown.index("\n" + begin) + 1
        following = [shown.find("\n\n" + other, start) for other in SNIPPETS]
        return shown[start : min([end for end in following if end > start], default=len(shown))]


@contextmanager
def demonstrated(*flags: str) -> Iterator[Shown]:
    port = free_port()
    process = subprocess.Popen(
        [sys.executable, "-m", "inlay.cli", "demo", "--port", str(port), *flags],
        stdout=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
        text=True,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert process.stdout is not None
    try:
        lines = []
        for line in process.stdout:
            lines.append(line)
            if line == "EOF\n":
                break
        yield Shown("".join(lines), f"http://127.0.0.1:{port}")
    finally:
        process.terminate()
        process.stdout.close()
        assert process.wait(START_SECONDS) == 0


@pytest.fixture(scope="module")
def shown() -> Iterator[Shown]:
    with demonstrated() as shown:
        yield shown


@pytest.fixture(scope="module")
def answers(shown: Shown) -> list[str]:
    found: list[str] = re.findall(r"^   < (.*)$", shown.text, re.M)
    return found


def test_it_shows_right_answers_in_all_four_ways(answers: list[str]) -> None:
    examples = demo.examples()
    text, as_embeddings, mixed, *soft = answers
    assert text == question_shown().answer
    assert as_embeddings == text
    assert mixed == examples.mixed[0].answer
    right = [answer == example.answer for answer, example in zip(soft, inputs_shown(), strict=True)]
    assert len(right) == 3
    assert sum(right) >= 2


@pytest.mark.extensions("tools")
@pytest.mark.parametrize("begin", SNIPPETS[:2])
def test_the_curl_snippets_answer_when_pasted(begin: str, shown: Shown, answers: list[str]) -> None:
    snippet = shown.snippet(begin)
    assert shown.url in snippet
    choice = json.loads(run("bash", "-c", snippet))["choices"][0]
    text = choice["text"] if "text" in choice else choice["message"]["content"]
    assert text.strip() == answers[0]


@pytest.mark.thorough
def test_the_openai_snippet_answers_when_pasted(shown: Shown, answers: list[str]) -> None:
    assert run("bash", "-c", shown.snippet(SNIPPETS[-1])).strip() == answers[0]


@pytest.mark.extensions("tools", "audit")
@pytest.mark.slow
def test_the_questions_about_embeddings_are_answered_when_pasted(shown: Shown) -> None:
    inspected, audited = (
        run("bash", "-c", shown.snippet(begin), within=230) for begin in SNIPPETS[2:4]
    )
    assert "8 rows of 192" in inspected
    assert "nearest tokens" in inspected
    none, noisy = audited.split("\nnoise:1: ")
    assert "worst tokens: 100.0" in none
    assert "answers the same: 100.0" in none
    assert "worst tokens: 100.0" in noisy
    assert "answers the same: 100.0" not in noisy


def test_the_texts_of_the_audit_are_those_of_the_script() -> None:
    made = audit_texts.lines(build_world(audit_texts.WORLD_SEED), audit_texts.SEED, 300)
    assert demo.texts_path().read_text(encoding="utf-8") == "\n".join(made) + "\n"


@pytest.mark.parametrize("loaded", [(), ("batches",), ("batches", "state")])
def test_it_keeps_what_clients_store_where_that_part_is_loaded(
    loaded: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(VARIABLE, ",".join(loaded))
    served = demo_command.served(DemoSettings(), port=0)
    check_loaded(served)
    assert (served.batches.batch_store, served.responses.response_store) == tuple(
        "memory" if name in loaded else "off" for name in ("batches", "state")
    )


def test_it_says_why_it_takes_another_port(monkeypatch: pytest.MonkeyPatch) -> None:
    said = io.StringIO()
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(demo_command, "DEFAULT_PORT", port)
        assert demo_command._port(DemoSettings(), Console(io.StringIO(), said)) == 0
    assert (
        f"cannot listen on 127.0.0.1:{port}: Address already in use (--port takes another); the demo takes a free port"
        in said.getvalue()
    )


@pytest.mark.slow
def test_it_ends_by_itself_when_asked_to() -> None:
    # Its processes import what they use, as outside of tests.
    with preloaded.started():
        done = subprocess.run(
            [sys.executable, "-m", "inlay.cli", "demo", "--no-keep-serving", "--port", "0"],
            capture_output=True,
            text=True,
            timeout=START_SECONDS,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
    assert done.returncode == 0, done.stderr
    assert "Try it:" in done.stdout
    # Between them, how long loading has taken, where it takes over a second, and the self-check.
    loading, importing, *waits, check, serving, stopping = done.stderr.splitlines()
    assert "loading" in loading
    assert "first imports torch" in importing
    assert all(wait.startswith("loading ") for wait in waits)
    assert "self-check: passed" in check
    assert serving.startswith("serving inlay-demo")
    assert stopping.startswith("stopping: 0 requests open")
