"""Write docs/cli.md and api-reference.md, the chart's schema and dashboard: `make reference`."""

from pathlib import Path

from scripts import api_reference, chart_schema, dashboard

from inlay.cli.reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def main() -> None:
    """Write the pages, the schema and the dashboard."""
    PAGE.write_text(reference(), encoding="utf-8")
    api_reference.PAGE.write_text(api_reference.reference(), encoding="utf-8")
    chart_schema.main()
    dashboard.main()


if __name__ == "__main__":
    main()
