"""Servers: of the bundled model, which keeps what it is given; one that embeds; one that hears."""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest

from inlay import demo
from tests.commands import run
from tests.serving import PYTHON, Served, serving

# Other environments collect all tests, and have not these libraries.
collect_ignore = [
    f"test_{name}.py"
    for name, library in (("agents", "agents"), ("langchain", "langchain_openai"))
    if find_spec(library) is None
]

NAME = "m"


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    words = ("--served-model-name", NAME, "--response-store", "memory", "--batch-store", "memory")
    with serving(demo.model_dir(), *words) as served:
        yield served


@pytest.fixture(scope="module")
def embedder() -> Iterator[Served]:
    words = ("--task", "embed", "--served-model-name", NAME, "--batch-store", "memory")
    with serving(demo.model_dir(), *words) as served:
        yield served


_SOUND = """
import shutil, sys
from tests.api.test_transcriptions import sound_file, with_template
shutil.copytree(with_template("qwen2_audio"), sys.argv[1])
open(sys.argv[2], "wb").write(sound_file(0.7))
"""


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Served, Path]]:
    """A server that hears, and a file for it."""
    folder = tmp_path_factory.mktemp("sound")
    model, file = folder / "model", folder / "a.wav"
    # Models are made where servers are started: this environment has no transformers.
    run(PYTHON, "-c", _SOUND, model, file)
    words = ("--served-model-name", NAME, "--max-model-len", "256", "--dtype", "float32")
    with serving(model, *words) as served:
        yield served, file
