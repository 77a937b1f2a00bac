"""Tests of the core run both ways.

Step after step, and each step launched before the last is read.
"""

import pytest

from inlay.engine.torch.step import Core


@pytest.fixture(params=[False, True], ids=["in_turn", "overlap"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Overlap of a core's steps, for tests that do not set it."""
    defaults = Core.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "overlap", request.param)
    return bool(request.param)
