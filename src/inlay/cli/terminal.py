"""The width of the terminal."""

import shutil


def columns() -> int:
    """Columns that text is wrapped to: the terminal's, at most 110; 100 where there is none."""
    return max(10, min(shutil.get_terminal_size((100, 24)).columns, 110))
