"""Models that servers are started with; they are made where torch is, in inlay's environment."""

import gc
import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.serving import PYTHON

_ROOT = Path(__file__).resolve().parents[3]
_MAKE = """
import json, sys
from tests.embedding_models import tiny_embedding, tiny_scoring
print(json.dumps({"embed": str(tiny_embedding("e5")), "score": str(tiny_scoring("bert"))}))
sys.stdout.flush()
sys.stdin.read()
"""


@pytest.fixture(scope="session")
def models() -> Iterator[dict[str, str]]:
    """Directories by task; they go with the process that made them."""
    made = subprocess.Popen(
        [PYTHON, "-c", _MAKE],
        cwd=_ROOT,
        env={**os.environ, "PYTHONPATH": f"{_ROOT}{os.pathsep}{_ROOT / 'src'}"},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    assert made.stdin is not None
    assert made.stdout is not None
    try:
        yield json.loads(made.stdout.readline())
    finally:
        made.stdin.close()
        made.wait(60)
        made.stdout.close()


@pytest.fixture(autouse=True)
def _forgotten() -> Iterator[None]:
    """Have connections that clients leave open warn in the test that they are of."""
    yield
    gc.collect()
