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


@pytest.mark.slow
@pytest.mark.parametrize("task", ["generate", "embed"])
def test_a_damaged_checkpoint_is_one_line_and_no_traceback(tmp_path: Path, task: str) -> None:
    directory = Path(shutil.copytree(tiny("qwen3"), tmp_path / "damaged"))
    weights = directory / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-1000])
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", "serve", str(directory), "--port", "0", "--task", task],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert "Traceback" not in done.stderr
    assert done.stderr.splitlines()[-1].startswith("inlay serve: ")
    assert "safetensors" in done.stderr.splitlines()[-1].lower()
