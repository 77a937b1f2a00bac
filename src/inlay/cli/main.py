"""The extensions that words name; from errors to one line and an exit status."""

import os
import sys
from collections.abc import Callable, Mapping, Sequence

from inlay.base.errors import InlayError
from inlay.cli.command import FileError, UsageError
from inlay.cli.process import EXIT_INTERRUPTED, Console, default_sigint
from inlay.extension import FLAG, VARIABLE

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_PIPE = 141
"""Status of a program that SIGPIPE has ended, as a shell shows it."""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run `inlay`.

    Returns:
        The exit status: 0 when it did what was asked, 1 when that failed, 2 when the words make no
            sense, 130 when it was interrupted.
    """
    given = list(sys.argv[1:] if argv is None else argv)
    console = Console(sys.stdout, sys.stderr)
    environ = os.environ if environ is None else environ
    if environ.get("INLAY_LOG_FORMAT") == "json":
        from inlay.telemetry import configure

        # Errors of the settings themselves, too.
        configure("json")

    def find_and_run() -> int:
        words = _choose_extensions(given)
        with default_sigint():
            # Only now: extensions add to the settings classes of commands.
            from inlay.cli.dispatch import act_of
        name, act = act_of(words, environ, console)
        return failing(name, console, act)

    return failing("inlay", console, find_and_run)


def failing(name: str, console: Console, act: Callable[[], int]) -> int:
    """The exit status of `act`, whose errors are one line."""
    try:
        return act()
    except FileError as error:
        console.error(f"{name}: {error}")
        return EXIT_USAGE
    except UsageError as error:
        console.error(f"{name}: {error} (see {name} --help)")
        return EXIT_USAGE
    except InlayError as error:
        console.error(f"{name}: {error.message}")
        return EXIT_FAILURE
    except KeyboardInterrupt:
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        # The reader of a pipe left; what is still buffered must not fail again when the interpreter
        # flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_PIPE


def _choose_extensions(given: Sequence[str]) -> list[str]:
    """Take `--extensions` out of the words; the environment gives it to all that is started.

    It may stand anywhere before `--`, as it says which commands and options there are.
    """
    words = list(given)
    end = words.index("--") if "--" in words else len(words)
    kept: list[str] = []
    index = 0
    while index < end:
        name, has_value, value = words[index].partition("=")
        index += 1
        if name != FLAG:
            kept.append(words[index - 1])
            continue
        if not has_value:
            if index == end:
                raise UsageError(f"{FLAG} needs a value")
            value = words[index]
            index += 1
        os.environ[VARIABLE] = value
    return [*kept, *words[end:]]
