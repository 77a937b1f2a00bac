"""Completion, asked of the real shells, where they are installed."""

import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

from inlay.cli import main
from inlay.cli.commands import commands
from tests.cli.terminals import terminal

pytestmark = pytest.mark.extensions("tools")

Complete = Callable[[str], set[str]]


def script(shell: str, directory: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    assert main(["completion", shell], {}) == 0
    path = directory / f"inlay.{shell}"
    path.write_text(capsys.readouterr().out)
    return path


def needs(shell: str) -> pytest.MarkDecorator:
    return pytest.mark.skipif(shutil.which(shell) is None, reason=f"{shell} is not installed")


@pytest.fixture
def in_bash(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Complete:
    path = script("bash", tmp_path, capsys)

    def complete(line: str) -> set[str]:
        words = " ".join(f"'{word}'" for word in line.split(" "))
        code = (
            f"source {path}; COMP_WORDS=({words}); COMP_CWORD=$((${{#COMP_WORDS[@]}} - 1)); "
            '_inlay; printf "%s\\n" "${COMPREPLY[@]}"; complete -p inlay >&2'
        )
        done = subprocess.run(
            ["bash", "--norc", "-uc", code],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert done.returncode == 0, done.stderr
        assert "-F _inlay inlay" in done.stderr
        return {word.strip() for word in done.stdout.splitlines() if word.strip()}

    return complete


@pytest.fixture
def in_fish(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Complete:
    path = script("fish", tmp_path, capsys)

    def complete(line: str) -> set[str]:
        code = f"source {path}; complete -C '{line}'"
        home = {"HOME": str(tmp_path), "PATH": "/usr/bin:/bin", "TERM": "dumb"}
        done = subprocess.run(
            ["fish", "--no-config", "-c", code],
            cwd=tmp_path,
            env=home,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert (done.returncode, done.stderr) == (0, "")
        return {word.split("\t")[0] for word in done.stdout.splitlines()}

    return complete


def holds(complete: Complete, directory: Path) -> None:
    """Commands, options, values and files are completed."""
    (directory / "rows.npy").write_bytes(b"")
    first = complete("inlay ")
    assert {"serve", "embeds", "chat", "bench", "completion"} <= first
    assert complete("inlay ser") == {"serve"}
    group = {c.name.split()[1] for c in commands() if c.name.startswith("embeds ")}
    assert group <= complete("inlay embeds ")
    assert complete("inlay embeds conv") == {"convert"}
    assert complete("inlay serve --max-num-b") == {"--max-num-batched-tokens"}
    assert complete("inlay serve m --no-enable-pref") == {"--no-enable-prefix-caching"}
    assert complete("inlay embeds encode --format ") == {"safetensors", "torch", "npy"}
    assert complete("inlay embeds encode --format saf") == {"safetensors"}
    assert complete("inlay completion ") >= {"bash", "zsh", "fish"}
    assert complete("inlay bench --prompts re") == {"refs"}
    assert complete("inlay bench --bodies ro") == {"rows.npy"}
    assert "write" in complete("inlay bench wr")
    assert "--stream" in complete("inlay bench write --str")
    assert complete("inlay bench --str") == set()
    assert complete("inlay serve m -- --max-num") == set()


@needs("bash")
def test_bash_completes(in_bash: Complete, tmp_path: Path) -> None:
    holds(in_bash, tmp_path)
    assert in_bash("inlay embeds encode --format = np") == {"npy"}


@needs("fish")
def test_fish_completes(in_fish: Complete, tmp_path: Path) -> None:
    holds(in_fish, tmp_path)


@needs("zsh")
def test_zsh_completes_at_a_terminal(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = script("zsh", tmp_path, capsys)
    (tmp_path / "rows.npy").write_bytes(b"")
    checked = subprocess.run(["zsh", "-n", str(path)], capture_output=True, text=True, timeout=60)
    assert (checked.returncode, checked.stderr) == (0, "")
    plain = {"HOME": str(tmp_path), "TERM": "dumb"}
    with terminal("-f", program=["zsh"], width=300, environment=plain) as screen:
        screen.type(f"cd {tmp_path}; autoload -U compinit; compinit -u -D; source {path}\n")
        screen.type("echo lo''aded\n")
        screen.until("loaded")
        for typed, expected in (
            ("inlay serv", "inlay serve "),
            ("inlay embeds conv", "inlay embeds convert "),
            ("inlay serve --max-num-b", "inlay serve --max-num-batched-tokens "),
            ("inlay embeds encode --format saf", "--format safetensors "),
            ("inlay completion fi", "completion fish "),
            ("inlay bench --bodies ro", "--bodies rows.npy "),
        ):
            screen.type(f"{typed}\t")
            screen.until(expected)
            screen.type("\x15")
        screen.type("exit\n")
        screen.ended()


def test_every_option_of_every_command_is_in_every_script(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for shell in ("bash", "zsh", "fish"):
        text = script(shell, tmp_path, capsys).read_text()
        for command in commands():
            for option in command.options.flags:
                name = f"-l {option.key}" if shell == "fish" else option.flag
                assert name in text, (shell, command.name, option.flag)
