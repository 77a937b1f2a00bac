"""Products that stay in the thread that asks for them."""

import os
import subprocess
import sys

import numpy as np
import pytest

from inlay.tensors.products import MULTIPLICATIONS, product

_ALONE = """
import threading, time
from pathlib import Path

import numpy as np
{imports}

def others():
    "State and time slices so far of the threads beside this one."
    own = str(threading.get_native_id())
    return {{
        task.name: ((task / "stat").read_text().rpartition(")")[2].split()[0],
                    int((task / "schedstat").read_text().split()[2]))
        for task in Path("/proc/self/task").iterdir() if task.name != own
    }}

{prepare}
np.ones((512, 512)) @ np.ones((512, 512))
assert others(), "OpenBLAS has no threads here"
while any(state != "S" for state, _ in others().values()):
    time.sleep(0.01)
before = others()
{work}
print(others() == before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.parametrize(
    ("imports", "prepare", "work"),
    [
        (
            "from inlay.media.sounds import resampled",
            "sound = np.ones(100_001 * 20, np.float32)",
            "resampled(sound, 100_001, 100)",
        ),
        (
            "import numpy as np; from inlay import demo; from inlay.tensors.table import EmbeddingTable",
            "table = EmbeddingTable.open(demo.model_dir()); rows = np.ones((100, table.shape[1]))",
            "from inlay.tensors.neighbours import nearest; nearest(rows, table, threads=False)",
        ),
        (
            "from inlay.api.openai.embeddings.similarity import Comparison",
            "one = {'dense': np.ones(60_000, np.float32)}",
            "Comparison([one], [one], 'dense').scores()",
        ),
    ],
    ids=["resampled", "nearest", "cosine"],
)
def test_no_other_thread_works_on_what_a_frontend_computes(
    imports: str, prepare: str, work: str
) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _ALONE.format(imports=imports, prepare=prepare, work=work)],
        env={**os.environ, "OMP_NUM_THREADS": "2", "OPENBLAS_NUM_THREADS": "2"},
        capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.stdout == "True\n", done.stderr


@pytest.mark.parametrize(
    ("asked", "found", "width"), [(1, 700, 64), (100, 333, 512), (3, 1, 8), (0, 5, 8), (5, 0, 8)]
)
def test_a_product_in_pieces_is_that_of_the_whole(asked: int, found: int, width: int) -> None:
    source = np.random.default_rng(1)
    rows = source.standard_normal((asked, width), np.float32)
    others = source.standard_normal((found, width), np.float32)
    assert product(rows, others) == pytest.approx(rows @ others.T, rel=1e-4, abs=1e-4)


def test_no_piece_is_so_large_that_it_is_threaded(monkeypatch: pytest.MonkeyPatch) -> None:
    real, sizes = np.matmul, []

    def watched(rows: np.ndarray, others: np.ndarray) -> np.ndarray:
        sizes.append(rows.size * others.shape[2])
        found: np.ndarray = real(rows, others)
        return found

    monkeypatch.setattr(np, "matmul", watched)
    product(np.ones((128, 1536), np.float32), np.ones((1000, 1536), np.float32))
    assert 0 < max(sizes) <= MULTIPLICATIONS
