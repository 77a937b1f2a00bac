"""The command line: `inlay serve`, `inlay demo`, `inlay embeds`."""

from inlay.cli.interrupts import without_a_word

with without_a_word():
    from inlay.cli.main import main

__all__ = ["main"]
