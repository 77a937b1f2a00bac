"""A model directory that cannot be served is refused at the start, in one line."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

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


def refused(model: Path, command: str, *words: str) -> str:
    """The one line that a command says which never started a process for its model."""
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", command, str(model), *words],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    (line,) = done.stderr.splitlines()
    assert done.returncode == 1
    return line.removeprefix(f"inlay {command}: ")


@pytest.mark.parametrize(
    "words",
    [
        ("serve", "--port", "0"),
        ("serve", "--port", "0", "--task", "embed"),
        ("worker", "--nats", NOWHERE),
        ("serve", "--port", "0", "--engine", "vllm", "--engine-python", "/no/python"),
    ],
    ids=["serve", "embed", "worker", "vllm"],
)
def test_weights_that_are_cut_short_are_refused_before_anything_is_started(
    tmp_path: Path, words: tuple[str, ...]
) -> None:
    directory = Path(shutil.copytree(tiny("qwen3"), tmp_path / "damaged"))
    weights = directory / "model.safetensors"
    size = weights.stat().st_size
    os.truncate(weights, size - 1000)
    assert refused(directory, *words) == f"{weights} is cut short: it has {size - 1000} of {size} bytes"


def test_a_directory_without_weights_is_refused_before_anything_is_started(tmp_path: Path) -> None:
    directory = shutil.copytree(
        tiny("qwen3"), tmp_path / "bare", ignore=shutil.ignore_patterns("*.safetensors")
    )
    said = f"{directory} has no weights: no *.safetensors file, and no other format is read"
    assert refused(Path(directory), "serve", "--port", "0") == said


@pytest.mark.slow
@pytest.mark.parametrize("task", ["generate", "embed"])
def test_weights_of_nan_are_never_announced_as_ready(tmp_path: Path, task: str) -> None:
    directory = Path(shutil.copytree(tiny("qwen3"), tmp_path / "nan"))
    tensors = load_file(directory / "model.safetensors")
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.full_like(tensors[name], np.nan)
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    done = subprocess.run(
        [sys.executable, "-m", "inlay.cli", "serve", str(directory), "--port", "0", "--task", task],
        capture_output=True,
        text=True,
        timeout=END_SECONDS,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 1
    assert "inlay serve: the model failed at its first token: " in done.stderr.splitlines()[-1]
    assert "not finite" in done.stderr.splitlines()[-1]
    assert "serving" not in done.stderr
