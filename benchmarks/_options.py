"""The command line of a benchmark."""

import argparse


def parser_of(text: str | None) -> argparse.ArgumentParser:
    """Return a parser whose help shows `text`, a benchmark's docstring, as it is written."""
    return argparse.ArgumentParser(
        description=text, formatter_class=argparse.RawDescriptionHelpFormatter
    )
