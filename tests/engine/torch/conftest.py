"""Tests of the core run both ways.

Step after step, and each step launched before the last is read.
"""

import pytest

from inlay.engine.torch.step import Core


@pytest.fixture(params=[False, True], ids=["in_turn", "overlap"])
def overlap(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether a core launches a step before it reads the last, where a test does not say."""
    defaults = Core.__init__.__kwdefaults__
    assert defaults is not None
    monkeypatch.setitem(defaults, "overlap", request.param)
    return bool(request.param)
