"""Write docs/cli.md, the chart's schema and dashboard: `make reference`."""

from pathlib import Path

from scripts import chart_schema, dashboard

from inlay.cli.reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def main() -> None:
    """Write the page, the schema and the dashboard."""
    PAGE.write_text(reference(), encoding="utf-8")
    chart_schema.main()
    dashboard.main()


if __name__ == "__main__":
    main()
