"""Write docs/cli.md, api-reference.md and metrics.md, the chart's schema and dashboard: `make reference`."""

from pathlib import Path

from scripts import api_reference, chart_schema, dashboard, metrics_reference

from inlay.cli.reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def main() -> None:
    """Write the pages, the schema and the dashboard."""
    PAGE.write_text(reference(), encoding="utf-8")
    api_reference.PAGE.write_text(api_reference.reference(), encoding="utf-8")
    metrics_reference.PAGE.write_text(metrics_reference.reference(), encoding="utf-8")
    chart_schema.main()
    dashboard.main()


if __name__ == "__main__":
    main()
