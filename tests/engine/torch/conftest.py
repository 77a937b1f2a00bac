"""Tests of the core run both ways.

Step after step, and each step launched before the last is read.
"""

import pytest

from inlay.engine.torch.speculation import Speculator
from inlay.engine.torch.step import Core


@pytest.fixture
def even_steps(monkeypatch: pytest.MonkeyPatch) -> None:
    """All steps count as equally long, so that the load of a machine decides no draft."""
    timed = Speculator.timed
    monkeypatch.setattr(Speculator, "timed", lambda self, chunks, _: timed(self, chunks, 0.001))


@pytest.fixture(params=[False, True], ids=["in_turn", "overlap"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Overlap of a core's steps, for tests that do not set it."""
    defaults = Core.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "overlap", request.param)
    return bool(request.param)
