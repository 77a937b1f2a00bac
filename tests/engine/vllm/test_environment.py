"""Refused variables of a user's environment."""

import pytest

from inlay.engine.vllm.environment import check
from inlay.errors import InvalidRequestError


def test_the_guard_against_nan_cannot_be_turned_off() -> None:
    for given in ({}, {"VLLM_COMPUTE_NANS_IN_LOGITS": "1"}):
        check(given)
    with pytest.raises(InvalidRequestError, match="VLLM_COMPUTE_NANS_IN_LOGITS=0 is set"):
        check({"VLLM_COMPUTE_NANS_IN_LOGITS": "0"})
