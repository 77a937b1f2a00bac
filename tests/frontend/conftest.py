"""One fleet for all tests of the frontend: a tiny Llama on the torch engine."""

from collections.abc import Iterator

import pytest

from inlay.render import Renderer
from tests.frontend.live import Fleet, fleet
from tests.models import EOS_ID, VOCAB_SIZE, tiny


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


@pytest.fixture(scope="session")
def blanks(llama: Fleet) -> dict[str, float]:
    """Against white space between the parts of JSON, of which a random model has no end."""
    renderer = Renderer.load(llama.path)
    return {
        str(id_): -100.0
        for id_ in range(VOCAB_SIZE)
        if id_ != EOS_ID and not renderer.decode([id_]).strip()
    }
