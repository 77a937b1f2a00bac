"""Files of the chart that scripts write are what the scripts say."""

from scripts.chart_schema import SCHEMA, chart_schema
from scripts.dashboard import FILE, dashboard


def test_the_schema_of_values_is_current() -> None:
    assert SCHEMA.read_text(encoding="utf-8") == chart_schema(), "run `make reference`"


def test_the_dashboard_is_current() -> None:
    assert FILE.read_text(encoding="utf-8") == dashboard(), "run `make reference`"
