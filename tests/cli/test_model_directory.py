"""A model directory that cannot be served is refused at the start, in one line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.models import tiny

END_SECONDS = 120
NOWHERE = "nats://127.0.0.1:1"


@pytest.fixture(scope="module")
def without(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a tokenizer."""
    directory = tmp_path_factory.mktemp("models") / "no-tokenizer"
    return Path(shutil.copytree(tiny("llama"), directory, ignore=shutil.ignore_patterns("tokenizer*")))


@pytest.mark.parametrize(
    "words", [("serve", "--port", "0"), ("worker", "--nats", NOWHERE)], ids=lambda words: words[0]
)
def test_a_model_without_a_tokenizer_is_refused_at_the_start(without: Path, words: tuple[str, ...]) -> None:
    command, *rest = words
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", command, str(without), "--engine", "echo", *rest],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    assert line.startswith(f"inlay {command}: {without} has no tokenizer.json")
