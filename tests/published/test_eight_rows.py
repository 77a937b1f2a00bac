"""The example of rows in place of a prompt, with fewer steps and fewer texts."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.published.conftest import checkpoint
from tests.published.prompts import GEMMA
from tests.serving import Served

pytestmark = [pytest.mark.published, pytest.mark.slow, pytest.mark.timeout(900)]
SCRIPT = Path(__file__).resolve().parents[2] / "examples" / "eight_rows.py"
STEPS = {"section": 80, "language": 8}
"""The second task is there to be in the same batch."""
ASKED = 48
LINE = re.compile(r"(\w+) +(8 rows|text), (\d+) texts seen +(\d+)% .* of 48 +(\d+)% +(\d+) +(\d+) ")


@pytest.fixture(scope="module")
def name() -> str:
    return GEMMA


def example(*words: object) -> str:
    done = subprocess.run(
        [sys.executable, str(SCRIPT), *map(str, words)],
        capture_output=True, text=True, timeout=800,
        env={**os.environ, "OMP_NUM_THREADS": str(os.cpu_count())},
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def tasks(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Trained while no server of the same model runs beside: it comes after."""
    if shutil.which("apt-cache") is None:
        pytest.skip("needs Debian's index of packages")
    root = tmp_path_factory.mktemp("tasks")
    for task, steps in STEPS.items():
        said = example(
            "train", checkpoint(GEMMA), "--task", task, "--steps", steps, "--out", root / task
        )
        losses = [float(loss) for loss in re.findall(r"loss +([\d.]+)", said)]
        assert losses[-1] < losses[0]
    return [root / task for task in STEPS]


def test_rows_do_better_than_a_prompt_with_examples(tasks: list[Path], server: Served) -> None:
    said = example("ask", *tasks, "--base-url", server.v1, "--model", "m", "--most", ASKED)
    assert len(re.findall(r"uploaded once, now 'pe-\w{32}'", said)) == 2
    found = {
        (task, way, int(seen)): (int(right), int(among), int(positions), int(size))
        for task, way, seen, right, among, positions, size in LINE.findall(said)
    }
    assert len(found) == 8, said
    rows, text = found["section", "8 rows", 640], found["section", "text", 24]
    assert rows[0] > text[0], said
    assert rows[1] > text[1], said
    # Fewer positions than a tenth, and a request of a reference.
    assert rows[2] < text[2] / 10
    assert rows[3] < 300 < text[3]
