"""The command line: `inlay serve`, `inlay demo`, `inlay embeds`."""

from inlay.cli.default_sigint import default_sigint

with default_sigint():
    from inlay.cli.main import main

__all__ = ["main"]
