"""The chart's schema is what its values and the settings classes say."""

from scripts.chart_schema import SCHEMA, chart_schema


def test_the_schema_of_values_is_current() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == chart_schema(), "run `make reference`"
