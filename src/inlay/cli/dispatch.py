"""From words to a command that runs.

Imported once the extensions are chosen: they add to the settings classes.
"""

import difflib
from collections.abc import Callable, Mapping, Sequence

import inlay
from inlay.base.build import build_id
from inlay.cli.command import Command, UsageError
from inlay.cli.commands import commands, known_variables
from inlay.cli.process import Console
from inlay.cli.reading import parse, read
from inlay.cli.scrub_argv import scrub_argv
from inlay.cli.usage import overview, usage


def act_of(
    words: Sequence[str], environ: Mapping[str, str], console: Console
) -> tuple[str, Callable[[], int]]:
    """Return what the words ask for: its name in errors, and a function that does it.

    Raises:
        UsageError: there is no such command.
        InvalidRequestError: an extension cannot be loaded.
    """
    if not words or words[0] in ("-h", "--help"):
        return "inlay", lambda: _show(console, commands())
    if words[1:2] in (["-h"], ["--help"]) and (group := _group(words[0])):
        return "inlay", lambda: _show(console, group)
    if words[0] == "--version":
        return "inlay", lambda: _say(console, f"inlay {inlay.__version__} (build {build_id()})\n")
    command, args = _find(words)
    return f"inlay {command.name}", lambda: _run(command, args, environ, console)


def _say(console: Console, text: str) -> int:
    console.out(text)
    return 0


def _show(console: Console, some: Sequence[Command]) -> int:
    return _say(console, overview((command.name, command.summary) for command in some))


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


def _run(
    command: Command, words: Sequence[str], environ: Mapping[str, str], console: Console
) -> int:
    parsed = parse(command, words)
    if parsed.help is not None:
        return _say(console, usage(command, parsed.help))
    settings = read(command, parsed, environ, known_variables())
    scrub_argv(command.options, parsed)
    return command.run(settings, parsed.extra_args)


def _group(word: str) -> list[Command]:
    """The commands of two words that begin with `word`, where it is none by itself."""
    if any(command.name == word for command in commands()):
        return []
    return [command for command in commands() if command.name.startswith(f"{word} ")]


def _meant(word: str, known: Sequence[str]) -> str:
    near = difflib.get_close_matches(word, known, n=1)
    return f", did you mean {near[0]}?" if near else ""
