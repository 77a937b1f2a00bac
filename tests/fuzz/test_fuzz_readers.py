"""What fuzzing each reader found, every time the tests run.

`python -m tests.fuzz.fuzz_readers` finds more.
"""

import pytest

from tests.fuzz.fuzz_readers import CORPUS, TARGETS, seeds
from tests.fuzz.fuzz_tensors import check, check_state_dict


def is_read(target: str, data: bytes) -> bool:
    """True if it is accepted."""
    make, _, state_dict = TARGETS[target]
    return check_state_dict(make(data)) if state_dict else check(make(data)) is not None


@pytest.mark.parametrize("target", TARGETS)
def test_what_was_found_is_refused_or_is_within_the_limits(target: str) -> None:
    found = sorted((CORPUS / target).iterdir())
    assert found
    for path in found:
        is_read(target, path.read_bytes())


@pytest.mark.parametrize("target", TARGETS)
def test_some_of_what_a_target_starts_from_is_read_and_some_is_not(target: str) -> None:
    assert {is_read(target, data) for data in seeds(target)} == {True, False}
