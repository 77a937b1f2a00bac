"""Write docs/cli.md and the chart's schema from the settings classes: `make reference`."""

from pathlib import Path

from scripts import chart_schema

from inlay.cli.reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def main() -> None:
    """Write the page and the schema."""
    PAGE.write_text(reference(), encoding="utf-8")
    chart_schema.main()


if __name__ == "__main__":
    main()
