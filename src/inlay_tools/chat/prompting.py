"""Messages typed at a terminal: history, several lines, completion of commands and files."""

import importlib
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

FENCE = '"""'
_PROMPT, _MORE = "> ", ". "
_KEPT = 1000


class Prompting:
    """Reads what a person types.

    A line that ends in a backslash goes on in the next; three quotation marks begin and end a
    message of several lines.

    Args:
        commands: words that a slash begins, completed by the tab key.
        history: file of earlier messages, or None to keep none.
    """

    def __init__(self, commands: Sequence[str], history: Path | None) -> None:
        self._commands = commands
        self._history = history
        self._readline = _readline()

    def __enter__(self) -> "Prompting":
        if self._readline is None:
            return self
        self._readline.set_completer(self._completed)
        self._readline.set_completer_delims(" \t")
        backend = "bind ^I rl_complete" if _is_libedit(self._readline) else "tab: complete"
        self._readline.parse_and_bind(backend)
        self._readline.set_history_length(_KEPT)
        if self._history is not None and self._history.is_file():
            self._readline.read_history_file(str(self._history))
        return self

    def __exit__(self, *_: object) -> None:
        if self._readline is None or self._history is None:
            return
        self._history.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
        # Created for its owner alone: what people ask is nobody else's business.
        os.close(os.open(self._history, os.O_WRONLY | os.O_CREAT, 0o600))
        self._readline.write_history_file(str(self._history))

    def message(self) -> str:
        """The next message. Raises `EOFError` at the end of input, `KeyboardInterrupt` on Ctrl-C.

        An end of input within a message ends the message.
        """
        line = input(_PROMPT)
        if line.lstrip().startswith(FENCE):
            return "\n".join(_fenced(line.lstrip().removeprefix(FENCE)))
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            try:
                lines.append(input(_MORE))
            except EOFError:
                break
        return "\n".join(lines)

    def _completed(self, text: str, state: int) -> str | None:
        line = self._readline.get_line_buffer().lstrip() if self._readline else ""
        found = [] if not line.startswith("/") else sorted(self._candidates(line, text))
        return found[state] if state < len(found) else None

    def _candidates(self, line: str, text: str) -> Iterator[str]:
        if " " not in line:
            yield from (f"{word} " for word in self._commands if word.startswith(text))
            return
        given = Path(text).expanduser()
        below = given if text.endswith("/") else given.parent
        head = text[: len(text) - len("" if text.endswith("/") else given.name)]
        start = "" if text.endswith("/") else given.name
        if below.is_dir():
            for path in below.iterdir():
                if path.name.startswith(start):
                    yield f"{head}{path.name}{'/' if path.is_dir() else ''}"


def _fenced(first: str) -> Iterator[str]:
    line = first
    while not line.rstrip().endswith(FENCE):
        yield line
        try:
            line = input(_MORE)
        except EOFError:
            return
    yield line.rstrip().removesuffix(FENCE)


def _readline() -> Any:
    """Python's `readline`, or None where it was built without."""
    try:
        return importlib.import_module("readline")
    except ImportError:
        return None


def _is_libedit(readline: Any) -> bool:
    return "libedit" in (readline.__doc__ or "")


def history_file() -> Path:
    """The file that messages are kept in."""
    state = os.environ.get("XDG_STATE_HOME")
    root = Path(state) if state else Path.home() / ".local" / "state"
    return root / "inlay" / "chat_history"
