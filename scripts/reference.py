"""Write docs/cli.md from the settings classes: `make reference`."""

from pathlib import Path

from inlay.cli.reference import reference

PAGE = Path(__file__).parents[1] / "docs" / "cli.md"


def main() -> None:
    """Write the page."""
    PAGE.write_text(reference(), encoding="utf-8")


if __name__ == "__main__":
    main()
