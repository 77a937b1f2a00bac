"""From words to a command, and from its errors to one line and an exit status."""

import difflib
import os
import sys
from collections.abc import Callable, Mapping, Sequence

import inlay
from inlay.base.build import build_id
from inlay.base.errors import InlayError
from inlay.cli.command import Command, FileError, UsageError
from inlay.cli.commands import commands, known_variables
from inlay.cli.process import EXIT_INTERRUPTED, Console
from inlay.cli.reading import parse, read, split_extra_args
from inlay.cli.scrub_argv import scrub_argv
from inlay.cli.usage import overview, usage
from inlay.engine.ranks import split_flag
from inlay.extension import FLAG, VARIABLE

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_PIPE = 141
"""Status of a program that SIGPIPE has ended, as a shell shows it."""


def main(argv: Sequence[str] | None = None, environ: Mapping[str, str] | None = None) -> int:
    """Run `inlay`.

    Returns:
        The exit status: 0 when it did what was asked, 1 when that failed, 2 when the words make no
            sense, 130 when it was
        interrupted.
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
        if not words or words[0] in ("-h", "--help"):
            console.out(overview((command.name, command.summary) for command in commands()))
            return 0
        if words[1:2] in (["-h"], ["--help"]) and (group := _group(words[0])):
            console.out(overview((command.name, command.summary) for command in group))
            return 0
        if words[0] == "--version":
            console.out(f"inlay {inlay.__version__} (build {build_id()})\n")
            return 0
        command, extra_args = _find(words)
        return failing(
            f"inlay {command.name}", console, lambda: _run(command, extra_args, environ, console)
        )

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


def _run(
    command: Command, words: Sequence[str], environ: Mapping[str, str], console: Console
) -> int:
    parsed = parse(command, words)
    if parsed.help is not None:
        console.out(usage(command, parsed.help))
        return 0
    settings = read(command, parsed, environ, known_variables())
    scrub_argv(command.options, parsed)
    return command.run(settings, parsed.extra_args)


def _choose_extensions(words: Sequence[str]) -> list[str]:
    """Take `--extensions` out of the words; the environment gives it to all that is started.

    It may stand anywhere, as it says which commands and options there are.
    """
    before, extra_args = split_extra_args(words)
    kept: list[str] = []
    index = 0
    while index < len(before):
        name, written, value = split_flag(before[index])
        index += 1
        if name != FLAG:
            kept.append(before[index - 1])
            continue
        if value is None:
            if index == len(before):
                raise UsageError(f"{written} needs a value")
            value = before[index]
            index += 1
        os.environ[VARIABLE] = value
    return [*kept, *(["--", *extra_args] if len(before) < len(words) else [])]


def _find(words: Sequence[str]) -> tuple[Command, Sequence[str]]:
    """The command `words` begin with, and the words after its name."""
    # "bench write" before "bench".
    for length in (2, 1):
        for command in commands():
            if command.name == " ".join(words[:length]) and len(words) >= length:
                return command, words[length:]
    group = [command.name.split()[1] for command in _group(words[0])]
    if group:
        raise UsageError(
            f"{words[0]} takes one of: {', '.join(group)}{_meant(' '.join(words[1:2]), group)}"
        )
    names = [command.name for command in commands()]
    what = "option" if words[0].startswith("-") else "command"
    raise UsageError(f"unknown {what} {words[0]}{_meant(words[0], names)}")


def _group(word: str) -> list[Command]:
    """The commands of two words that begin with `word`, where it is none by itself."""
    if any(command.name == word for command in commands()):
        return []
    return [command for command in commands() if command.name.startswith(f"{word} ")]


def _meant(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {near[0]}?" if near else ""
