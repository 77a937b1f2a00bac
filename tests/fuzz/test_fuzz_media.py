"""A short run of the fuzzer of media."""

import pytest

from tests.fuzz.fuzz_media import TARGETS, fuzz, seeds


@pytest.mark.parametrize("target", TARGETS)
def test_mutated_files_are_refused_or_are_what_pillow_says(target: str) -> None:
    assert all(TARGETS[target](data) for data in seeds(target))
    assert 0 < fuzz(target, 3000, 1) < 3000
