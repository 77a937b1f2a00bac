"""A short run of the fuzzer of tool calls and their schemas.

`python -m tests.fuzz.fuzz_tools` does the rest.
"""

import pytest

from tests.fuzz.fuzz_tools import TARGETS, fuzz, seeds


@pytest.mark.parametrize("target", TARGETS)
def test_changed_texts_and_schemas_mean_what_they_say(target: str) -> None:
    for data in seeds(target):
        TARGETS[target](data)
    assert 0 < fuzz(target, 600, 1) < 600
