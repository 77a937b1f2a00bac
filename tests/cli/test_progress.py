"""Progress: nothing for short waits, one line on a terminal, plain lines elsewhere."""

import io
import threading

import pytest

from inlay.cli import process
from inlay.cli.process import Console, waiting


class Seen(io.StringIO):
    """A stream that says when something was written."""

    def __init__(self, terminal: bool) -> None:
        super().__init__()
        self.terminal = terminal
        self.wrote = threading.Event()

    def isatty(self) -> bool:
        return self.terminal

    def write(self, text: str) -> int:
        written = super().write(text)
        self.wrote.set()
        return written


def test_a_short_wait_says_nothing() -> None:
    stream = Seen(terminal=True)
    with waiting(Console(io.StringIO(), stream), "work"):
        pass
    assert stream.getvalue() == ""


@pytest.mark.parametrize("terminal", [True, False])
def test_a_long_wait_is_one_line_wiped_out_or_a_plain_one(
    terminal: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(process, "SHOWN_AFTER", 0.01)
    monkeypatch.setenv("COLUMNS", "20")
    stream = Seen(terminal)
    with waiting(Console(io.StringIO(), stream), lambda: "fetching a model that is large"):
        assert stream.wrote.wait(60)
    shown = stream.getvalue()
    if terminal:
        assert shown.startswith("\r\x1b[Kfetching a model th\r")
        assert shown.endswith("\r\x1b[K")
    else:
        assert shown == "fetching a model that is large (0 s)\n"
