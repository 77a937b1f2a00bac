"""`inlay completion`: scripts for shells, made from the settings classes alone.

They are static: no Python starts when the tab key is pressed. Each knows the commands, the options
of each, and the values of an option: one of a list, or a file.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from inlay.cli.command import Command
from inlay.cli.commands import commands
from inlay.cli.process import Console
from inlay.extension import FLAG
from inlay_tools.settings import CompletionSettings


def run(settings: CompletionSettings) -> int:
    """Print the script; the exit status."""
    make = {"bash": _bash, "zsh": _zsh, "fish": _fish}[settings.shell]
    Console(sys.stdout, sys.stderr).out("\n".join(make(commands())) + "\n")
    return 0


@dataclass(frozen=True)
class _Flag:
    """One spelling of an option.

    Attributes:
        word: `--port`, `-o`.
        said: the first sentence about it.
        takes: True if a value follows.
        choices: its values, where they are known.
        files: True if a value may be a file.
    """

    word: str
    said: str
    takes: bool = False
    choices: Sequence[str] = ()
    files: bool = False


def _flags(command: Command) -> Iterator[_Flag]:
    for option in command.options.flags:
        said = _first_sentence(option.description)
        if option.kind == "switch":
            yield _Flag(f"--{option.key}", said)
            yield _Flag(f"--no-{option.key}", f"Not: {said}")
            continue
        choices = option.choices
        files = not choices and option.element not in (int, float)
        for word in (option.flag, *([f"-{option.short}"] if option.short else [])):
            yield _Flag(word, said, True, choices, files)
    yield _Flag("--config", "Read options from a YAML or TOML file.", True, (), True)
    yield _Flag(FLAG, "Load these extensions, separated by commas.", True)
    yield _Flag("--help", "Show the options.")


def _places(command: Command) -> Sequence[str]:
    """Values of what is given by its place, where they are known."""
    return [choice for option in command.options.positionals for choice in option.choices]


def _first_sentence(text: str) -> str:
    return re.split(r"(?<=[.;:])\s", text, maxsplit=1)[0].rstrip(".;:")


def _first_words(commands: Sequence[Command]) -> dict[str, str]:
    """The words that may follow `inlay`, and a line about each."""
    found: dict[str, str] = {}
    for command in commands:
        first, _, second = command.name.partition(" ")
        found[first] = found.get(first, f"{first} ..." if second else command.summary)
    return found


def _second_words(commands: Sequence[Command]) -> dict[str, dict[str, str]]:
    """The words that may follow a first one."""
    found: dict[str, dict[str, str]] = {}
    for command in commands:
        first, _, second = command.name.partition(" ")
        if second:
            found.setdefault(first, {})[second] = command.summary
    return found


def _after_options(
    commands: Sequence[Command], choose: Callable[[Sequence[str]], str], choose_file: str
) -> Iterator[str]:
    """Cases of bash and zsh: what may follow each option that takes a value."""
    for command in commands:
        for flag in _flags(command):
            found = choose(flag.choices) if flag.choices else choose_file if flag.files else ""
            if flag.takes:
                yield f'    "{command.name} {flag.word}") {found}{"; " if found else ""}return ;;'


def _bash(commands: Sequence[Command]) -> Iterator[str]:
    yield "# Completion of inlay for bash."
    yield "_inlay() {"
    yield '  local cur="${COMP_WORDS[COMP_CWORD]-}" prev="${COMP_WORDS[COMP_CWORD-1]-}"'
    yield '  local one="${COMP_WORDS[1]-}" two="${COMP_WORDS[2]-}"'
    yield '  local command="" options="" values="" word'
    yield "  COMPREPLY=()"
    yield "  # bash breaks words at =."
    yield '  if [ "$cur" = "=" ]; then cur=""; fi'
    yield '  if [ "$prev" = "=" ]; then prev="${COMP_WORDS[COMP_CWORD-2]}"; fi'
    yield '  for word in "${COMP_WORDS[@]:1:COMP_CWORD-1}"; do [ "$word" = "--" ] && return; done'
    yield '  if [ "$COMP_CWORD" -eq 1 ]; then'
    first = " ".join([*_first_words(commands), "--help", "--version"])
    yield f'    COMPREPLY=($(compgen -W "{first}" -- "$cur"))'
    yield "    return"
    yield "  fi"
    yield '  if [ "$COMP_CWORD" -eq 2 ]; then two=""; fi'
    yield '  case "$one $two" in'
    for command in sorted(commands, key=lambda each: -len(each.name.split())):
        pattern = f'"{command.name}"' if " " in command.name else f'"{command.name} "*'
        words = " ".join(flag.word for flag in _flags(command))
        places = " ".join(_places(command))
        yield f'    {pattern}) command="{command.name}" options="{words}" values="{places}" ;;'
    yield "  esac"
    seconds = _second_words(commands)
    yield '  if [ "$COMP_CWORD" -eq 2 ]; then case "$one" in'
    for group, words_after in seconds.items():
        yield f'    {group}) values="$values {" ".join(words_after)}" ;;'
    yield "  esac; fi"
    yield '  case "$command $prev" in'
    yield from _after_options(
        commands,
        lambda choices: f'COMPREPLY=($(compgen -W "{" ".join(choices)}" -- "$cur"))',
        'COMPREPLY=($(compgen -f -- "$cur"))',
    )
    yield "  esac"
    yield '  if [ "${cur#-}" != "$cur" ]; then'
    yield '    COMPREPLY=($(compgen -W "$options" -- "$cur"))'
    yield "  else"
    yield '    COMPREPLY=($(compgen -W "$values" -- "$cur"))'
    yield "  fi"
    yield "}"
    yield "complete -o default -o bashdefault -F _inlay inlay"


def _quoted(text: str) -> str:
    """For bash and zsh."""
    return "'" + text.replace("'", "'\\''") + "'"


def _zsh(commands: Sequence[Command]) -> Iterator[str]:
    yield "#compdef inlay"
    yield "# Completion of inlay for zsh."
    yield "_inlay() {"
    yield '  local one="${words[2]}" two="${words[3]}" prev="${words[CURRENT-1]}" command=""'
    yield "  local -a options values commands"
    yield "  if (( ${words[(I)--]} && ${words[(I)--]} < CURRENT )); then _files; return; fi"
    yield "  if (( CURRENT == 2 )); then"
    yield f"    commands=({_described(_first_words(commands))})"
    yield "    _describe 'command' commands"
    yield "    return"
    yield "  fi"
    yield '  if (( CURRENT == 3 )); then two=""; fi'
    yield '  case "$one $two" in'
    for command in sorted(commands, key=lambda each: -len(each.name.split())):
        pattern = f'"{command.name}"' if " " in command.name else f'"{command.name} "*'
        listed = _described({flag.word: flag.said for flag in _flags(command)})
        places = " ".join(map(_quoted, _places(command)))
        yield f"    {pattern}) command={_quoted(command.name)}"
        yield f"      options=({listed})"
        yield f"      values=({places}) ;;"
    yield "  esac"
    yield '  if (( CURRENT == 3 )); then case "$one" in'
    for first, after in _second_words(commands).items():
        yield f"    {first}) commands=({_described(after)}); _describe 'command' commands ;;"
    yield "  esac; fi"
    yield '  case "$command $prev" in'
    yield from _after_options(
        commands, lambda choices: f"compadd -- {' '.join(map(_quoted, choices))}", "_files"
    )
    yield "  esac"
    yield '  if [[ "${words[CURRENT]}" == -* ]]; then'
    yield "    _describe 'option' options"
    yield "  elif (( ${#values} )); then"
    yield "    compadd -- $values"
    yield '  elif [[ -n "$command" ]]; then'
    yield "    _files"
    yield "  fi"
    yield "}"
    yield 'if [ "$funcstack[1]" = "_inlay" ]; then _inlay "$@"; else compdef _inlay inlay; fi'


def _described(words: dict[str, str]) -> str:
    return " ".join(
        _quoted(f"{word}:{_first_sentence(said)}" if said else word) for word, said in words.items()
    )


def _fish_quoted(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'") + "'"


def _fish(commands: Sequence[Command]) -> Iterator[str]:
    yield "# Completion of inlay for fish."
    yield "function __inlay_command"
    yield "    set -l words (commandline -opc)[2..-1]"
    yield "    contains -- -- $words; and return"
    yield '    switch "$words[1] $words[2]"'
    names = [command.name for command in commands]
    yield f"        case {' '.join(_fish_quoted(name) for name in names if ' ' in name)}"
    yield '            echo "$words[1] $words[2]"'
    yield "            return"
    yield "    end"
    yield '    switch "$words[1]"'
    yield f"        case {' '.join(name for name in names if ' ' not in name)}"
    yield '            echo "$words[1]"'
    yield "    end"
    yield "end"
    yield "function __inlay_words"
    yield "    set -l words (commandline -opc)[2..-1]"
    yield '    test "$words" = "$argv"'
    yield "end"
    yield "complete -c inlay -f"
    for word, said in _first_words(commands).items():
        about = _fish_quoted(_first_sentence(said))
        yield f"complete -c inlay -n '__inlay_words' -a {word} -d {about}"
    for first, after in _second_words(commands).items():
        for word, said in after.items():
            about = _fish_quoted(_first_sentence(said))
            yield f"complete -c inlay -n '__inlay_words {first}' -a {word} -d {about}"
    for command in commands:
        head = f"complete -c inlay -n 'string match -q -- \"{command.name}\" (__inlay_command)'"
        places = _places(command)
        if places:
            yield f"{head} -a {_fish_quoted(' '.join(places))}"
        elif command.options.positionals:
            yield f"{head} -F"
        for flag in _flags(command):
            name = f"-l {flag.word[2:]}" if flag.word.startswith("--") else f"-s {flag.word[1:]}"
            value = ""
            if flag.choices:
                value = f" -x -a {_fish_quoted(' '.join(flag.choices))}"
            elif flag.takes:
                value = " -r -F" if flag.files else " -x"
            yield f"{head} {name}{value} -d {_fish_quoted(flag.said)}"
