"""Every field of vLLM's request types is one of inlay's: served, or refused with a reason.

So none is forgotten when vLLM is updated.
"""

from importlib import import_module
from typing import Any

import msgspec
import pytest

from inlay.api.schema.unserved import reason_for, unserved
from tests.vllm_requests import PAIRS


def fields_of(theirs: str) -> dict[str, Any]:
    """The fields of one of vLLM's types."""
    module, _, name = theirs.rpartition(".")
    fields: dict[str, Any] = getattr(import_module(f"vllm.entrypoints.{module}"), name).model_fields
    return fields


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_no_field_of_a_request_of_vllms_is_ignored(theirs: str, ours: type[msgspec.Struct]) -> None:
    assert sorted(set(fields_of(theirs)) - set(ours.__struct_fields__)) == []


@pytest.mark.parametrize(("theirs", "ours"), PAIRS)
def test_vllms_default_of_a_refused_field_asks_for_nothing(
    theirs: str, ours: type[msgspec.Struct]
) -> None:
    fields = fields_of(theirs)
    for name in set(unserved(ours)) & set(fields):
        assert fields[name].is_required() or reason_for(ours, name).allows(
            fields[name].get_default()
        ), name
