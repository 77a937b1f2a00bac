import pytest

from inlay.engine.api import GenerateEngine
from tests.engine.conformance import EngineConformance


@pytest.mark.asyncio(loop_scope="session")
class TestSglangEngine(EngineConformance):
    """The same tests as the torch engine's, with one engine for all."""

    @pytest.fixture
    def engine(self, shared: GenerateEngine) -> GenerateEngine:
        return shared
