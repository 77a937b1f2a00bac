"""Files of commands that are none, or not what is wanted: one line that names them."""

import os
from pathlib import Path

import pytest

from inlay import demo
from inlay.cli.main import main

pytestmark = pytest.mark.extensions("tools", "audit", "batches", "stages", "state")

NOWHERE = "--url http://127.0.0.1:9"
FLEET = "--nats nats://127.0.0.1:9"
COMMANDS = (
    f"bench {NOWHERE} --bodies FILE",
    "embeds audit --model MODEL --texts FILE",
    "embeds audit --model MODEL --texts TEXTS --compare FILE",
    "embeds convert FILE --output MADE",
    "embeds encode --model MODEL --messages FILE --output MADE",
    "embeds inspect FILE",
    f"embeds upload FILE {NOWHERE}",
    f"frontend {FLEET} --nats-creds FILE",
    f"frontend {FLEET} --nats-nkey-seed FILE",
    f"frontend {FLEET} --nats-tls-ca FILE",
    f"frontend {FLEET} --secret-file FILE",
    f"plan {NOWHERE} --step-times FILE",
    f"run-batch {NOWHERE} --input-file FILE --output-file MADE",
    "serve MODEL --engine echo --api-key-file FILE",
    "serve MODEL --engine echo --config FILE",
    "serve MODEL --engine echo --ssl-certfile FILE",
)
"""FILE is to be one; MADE is never."""


@pytest.fixture
def files(tmp_path: Path) -> dict[str, Path]:
    named = {
        name: tmp_path / f"{name}.yaml" for name in ("directory", "missing", "empty", "binary")
    }
    named["directory"].mkdir()
    named["empty"].touch(0o600)
    named["binary"].touch(0o600)
    named["binary"].write_bytes(bytes(range(128, 256)) * 2)
    return named


def said(
    command: str, file: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> tuple[int, str]:
    texts = tmp_path / "texts"
    texts.write_text("".join(f"The lamp number {n} is green.\n" for n in range(60)))
    made = tmp_path / "made"
    stands = {"FILE": file, "MADE": made, "MODEL": demo.model_dir(), "TEXTS": texts}
    words = [str(stands.get(word, word)) for word in command.split()]
    status = main(words, {"PATH": os.environ["PATH"]})
    assert not made.exists()
    return status, capsys.readouterr().err


@pytest.mark.parametrize("kind", ["directory", "missing", "empty", "binary"])
@pytest.mark.parametrize("command", COMMANDS)
def test_what_is_no_such_file_is_named_in_one_line(
    command: str,
    kind: str,
    files: dict[str, Path],
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    if (kind == "empty" and "--config" in command) or (kind == "binary" and "upload" in command):
        pytest.skip("an empty file of settings sets none; of others a server says what they are")
    status, text = said(command, files[kind], tmp_path, capsys)
    assert status in (1, 2)
    assert str(files[kind]) in text, text
    assert text.startswith("inlay ")
    assert text.count("\n") == 1, text
    assert not any(word in text for word in ("Errno", "codec", "NoneType", "_ssl.c")), text
    if kind == "directory" and "--secret-file" not in command:
        assert "it is a directory, and must be a file" in text


@pytest.mark.parametrize("flag", ["--report", "--svg"])
def test_an_output_that_cannot_be_written_is_named_by_its_flag(
    flag: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    command = (
        f"embeds audit --model MODEL --texts TEXTS --attackers nearest --transform none {flag} FILE"
    )
    status, text = said(command, tmp_path, tmp_path, capsys)
    assert (status, text) == (
        2,
        f"inlay embeds audit: {flag} {tmp_path}: it is a directory, and must be a file\n",
    )
