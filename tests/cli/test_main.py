"""`inlay` itself: help, version, words that make no sense."""

import inspect
import os
import subprocess
import sys
from importlib import import_module
from pathlib import Path

import pytest

import inlay
from inlay.base.build import build_id
from inlay.cli import main
from inlay.cli.command import Command
from inlay.cli.commands import commands
from tests.commands import run

pytestmark = pytest.mark.usefixtures("started_processes")


@pytest.mark.parametrize("words", [[], ["--help"], ["-h"]])
def test_help_names_every_command(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(words, {}) == 0
    out = capsys.readouterr().out
    assert all(command.name in out for command in commands())


@pytest.mark.parametrize("name", [command.name for command in commands()])
def test_each_command_has_help(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*name.split(), "--help"], {}) == 0
    assert capsys.readouterr().out.startswith(f"usage: inlay {name}")


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_each_command_is_run_with_its_settings_and_the_words_that_go_on(command: Command) -> None:
    run = import_module(command.module).run
    takes = list(inspect.signature(run).parameters.values())
    assert takes[0].annotation is command.settings
    assert [each.name for each in takes[1:]] == ["extra_args"] * bool(command.extra_args)


@pytest.mark.parametrize("command", commands(), ids=lambda command: command.name)
def test_a_command_that_writes_or_prints_a_result_does_so_as_json_too(command: Command) -> None:
    fields = command.settings.model_fields
    shown = {option.flag: option.short for option in command.options.flags}
    if "output" in fields or "output_format" in fields:
        assert shown.pop("--output-format") == "o"
    else:
        # What `inlay run-batch` writes is lines of JSON; vLLM has the letter too.
        shown.pop("--output-file", None)
    assert not any(shown.values())


def test_the_version_is_the_packages(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--version"], {}) == 0
    assert capsys.readouterr().out == f"inlay {inlay.__version__} (build {build_id()})\n"


def test_the_package_is_the_command() -> None:
    assert (
        run(sys.executable, "-m", "inlay", "--version")
        == f"inlay {inlay.__version__} (build {build_id()})\n"
    )


@pytest.mark.extensions("tools")
@pytest.mark.parametrize(
    ("words", "said"),
    [
        (["serv"], "inlay: unknown command serv, did you mean serve? (see inlay --help)"),
        (["--verbose"], "inlay: unknown option --verbose"),
        (["embeds"], "inlay: embeds takes one of: encode, inspect"),
        (["embeds", "encod"], "upload, convert, audit, did you mean encode? (see inlay --help)"),
        (["embeds", "show"], "inlay: embeds takes one of: encode, inspect"),
        (["serve"], "inlay serve: MODEL is missing; "),
        (["serve", "--help", "looora"], "no heading and no option has 'looora' in its name"),
        (["serve", "m", "--prot", "1"], "inlay serve: unknown option --prot, did you mean --port?"),
        (["demo", "--", "x"], "inlay demo: takes no further arguments, got 'x' after --"),
        (
            ["serve", "m", "--", "-x"],
            "the torch engine takes no further arguments, got '-x' after --",
        ),
    ],
)
def test_words_that_make_no_sense_are_one_line_and_status_2(
    words: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words, {}) == 2
    captured = capsys.readouterr()
    assert said in captured.err
    assert captured.err.count("\n") == 1
    assert captured.out == ""


@pytest.mark.extensions("tools")
def test_help_of_a_group_lists_its_commands(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["embeds", "--help"], {}) == 0
    said = capsys.readouterr().out
    for command in commands():
        assert (f"  {command.name} " in said) == command.name.startswith("embeds ")


def test_help_shows_what_is_used_first_and_the_rest_when_asked(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def helped(*words: str) -> str:
        assert main(["serve", *words], {}) == 0
        return capsys.readouterr().out

    first, everything = helped("--help"), helped("-h", "all")
    assert first.count("\n  --") == 12 + len(("--config", "--extensions"))
    assert first.count("\n") < 90 < 250 < everything.count("\n")
    assert "--router-queue-size N" not in first
    assert "--router-queue-size N" in everything
    assert everything == helped("--help=all")
    assert helped("m", "--help", "LoRA").count("lora") > 8
    assert "--port" not in helped("--help", "lora")
    one = helped("--help", "router-queue-s")
    assert "--router-queue-size N" in one
    assert one == helped("--help", "router_queue_s")


def test_a_command_without_its_model_names_what_is_here(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for directory in ("models/small one", "models/empty", "hub/models--owner--kept/snapshots/1"):
        (tmp_path / directory).mkdir(parents=True)
        (tmp_path / directory / "config.json").write_text("{}")
    for directory in ("models/small one", "hub/models--owner--kept/snapshots/1"):
        (tmp_path / directory / "model.safetensors").write_bytes(b"")
    (tmp_path / "one.gguf").write_bytes(b"")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.chdir(tmp_path)
    assert main(["serve"], {}) == 2
    said = capsys.readouterr().err
    assert "models here: one.gguf, 'models/small one'; " in said
    assert "downloaded from the hub: owner/kept; or try the bundled one: inlay demo" in said
    assert "empty" not in said


def test_help_needs_no_heavy_library() -> None:
    code = (
        "import sys; from inlay.cli import main; main(['serve', '--help'], {}); "
        "print([name for name in ('torch', 'transformers', 'safetensors', 'openai') if name in sys.modules])"
    )
    assert run(sys.executable, "-c", code).splitlines()[-1] == "[]"


def test_a_pipe_that_nobody_reads_ends_a_command_quietly() -> None:
    reads, writes = os.pipe()
    os.close(reads)
    try:
        done = subprocess.run(
            [sys.executable, "-m", "inlay.cli", "serve", "--help"],
            stdout=writes,
            stderr=subprocess.PIPE,
            timeout=120,
        )
    finally:
        os.close(writes)
    assert (done.returncode, done.stderr) == (141, b"")
