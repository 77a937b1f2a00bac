"""The command line: `inlay serve`, `inlay demo`, `inlay embeds`."""

from inlay.cli.main import main

__all__ = ["main"]
