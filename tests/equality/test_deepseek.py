"""DeepSeek-R1 in fp8 through `inlay serve` with the built-in engine."""

from collections.abc import Iterator

import pytest

from tests.deepseek import tiny_r1
from tests.equality.r1 import R1Conformance
from tests.serving import Served, serving


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    words = ("--dtype", "float32", "--served-model-name", "m", "--enable-prompt-embeds")
    with serving(tiny_r1(), *words) as served:
        yield served


class TestR1(R1Conformance):
    """The same tests as vLLM's, of the checkpoint as it is published."""
