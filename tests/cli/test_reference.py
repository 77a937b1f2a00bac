"""The pages of references are what the code says: settings classes and types of requests."""

import pytest
from scripts import api_reference, metrics_reference
from scripts.reference import PAGE

from inlay.cli.reference import reference

pytestmark = pytest.mark.extensions()


def test_the_reference_page_is_current() -> None:
    assert PAGE.read_text(encoding="utf-8") == reference(), "run `make reference`"


def test_the_page_of_routes_and_fields_is_current() -> None:
    said = api_reference.PAGE.read_text(encoding="utf-8")
    assert said == api_reference.reference(), "run `make reference`"


def test_the_page_of_metrics_is_current() -> None:
    said = metrics_reference.PAGE.read_text(encoding="utf-8")
    assert said == metrics_reference.reference(), "run `make reference`"
