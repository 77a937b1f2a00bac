"""The terminal of a chat: plain unless it is one."""

import os
import re

from inlay.cli.process import Console

_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_DIM, _RESET = "\x1b[2m", "\x1b[0m"


class Screen:
    """Writes answers.

    What a model says is not trusted: on a terminal its control characters are shown, not obeyed.

    Args:
        console: its streams.
        terminal: True if standard output is a terminal; asked of it unless given.
    """

    def __init__(self, console: Console, terminal: bool | None = None) -> None:
        self.console = console
        self.terminal = console.stdout.isatty() if terminal is None else terminal
        self.colour = (
            self.terminal and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"
        )
        self._ended = True

    def text(self, text: str) -> None:
        """A piece of an answer."""
        self.console.out(self._safe(text))
        self._ended = text.endswith("\n")

    def aside(self, text: str) -> None:
        """A piece of the model's reasoning: dim on a terminal, left out elsewhere."""
        if self.terminal:
            safe = self._safe(text)
            self.console.out(f"{_DIM}{safe}{_RESET}" if self.colour else safe)
            self._ended = text.endswith("\n")

    def end(self) -> None:
        """End the line, unless it is ended."""
        if not self._ended:
            self.console.out("\n")
        self._ended = True

    def note(self, text: str) -> None:
        """A line that is no answer, on standard error."""
        self.console.line(self._safe(text))

    def _safe(self, text: str) -> str:
        if not self.terminal:
            return text
        return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)
