"""What fuzzing each reader found, every time the tests run.

`python -m tests.fuzz.fuzz_readers` finds more.
"""

import pytest

from tests.fuzz.fuzz_readers import CORPUS, TARGETS, seeds
from tests.fuzz.fuzz_tensors import check


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_found_is_refused_or_is_a_tensor_within_the_limits(target: str) -> None:
    make, _ = TARGETS[target]
    found = sorted((CORPUS / target).iterdir())
    assert found
    for path in found:
        check(make(path.read_bytes()))


@pytest.mark.parametrize("target", TARGETS)
def test_some_of_what_a_target_starts_from_is_a_tensor_and_some_is_not(target: str) -> None:
    make, _ = TARGETS[target]
    assert {check(make(data)) is None for data in seeds(target)} == {True, False}
