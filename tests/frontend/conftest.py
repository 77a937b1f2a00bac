"""One fleet for all tests of the frontend: a tiny Llama on the torch engine."""

from collections.abc import Iterator

import pytest

from tests.frontend.live import Fleet, fleet
from tests.models import tiny


@pytest.fixture(scope="session")
def llama() -> Iterator[Fleet]:
    with fleet(tiny("llama")) as running:
        yield running


@pytest.fixture(scope="session")
def url(llama: Fleet) -> str:
    """A frontend that takes embeddings."""
    return llama.serve(enable_prompt_embeds=True)


@pytest.fixture(scope="session")
def plain_url(llama: Fleet) -> str:
    """A frontend as it is without any settings."""
    return llama.serve()
