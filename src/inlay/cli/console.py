"""Where a command writes: results to standard output, progress and errors to standard error."""

from dataclasses import dataclass
from typing import TextIO


@dataclass(frozen=True)
class Console:
    """Two streams. What a program may read goes to `stdout` alone."""

    stdout: TextIO
    stderr: TextIO

    def out(self, text: str) -> None:
        """Write `text`, a result, as it is."""
        self.stdout.write(text)
        self.stdout.flush()

    def line(self, text: str) -> None:
        """Write one line of progress or error, whatever line breaks `text` has."""
        self.stderr.write(" ".join(text.split()) + "\n")
        self.stderr.flush()
