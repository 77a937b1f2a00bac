"""A server of the bundled model that keeps what it is given."""

from collections.abc import Iterator
from importlib.util import find_spec

import pytest

from inlay import demo
from tests.serving import Served, serving

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
