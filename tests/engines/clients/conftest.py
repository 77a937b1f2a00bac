"""A server of the bundled model that keeps what it is given."""

from collections.abc import Iterator

import pytest

from inlay import demo
from tests.serving import Served, serving

NAME = "m"


@pytest.fixture(scope="session")
def server() -> Iterator[Served]:
    words = ("--served-model-name", NAME, "--response-store", "memory", "--batch-store", "memory")
    with serving(demo.model_dir(), *words) as served:
        yield served
