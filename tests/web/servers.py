"""The demo's model behind as many frontends as a test asks for."""

from collections.abc import Iterator

import pytest

from inlay import demo as bundled
from tests.live import Fleet, fleet


@pytest.fixture(scope="module")
def demo() -> Iterator[Fleet]:
    with fleet(bundled.model_dir(), dtype="float32", enable_sleep_mode=True) as running:
        yield running
