"""Text of `--help`, in the terminal's width."""

import textwrap
from collections.abc import Iterable

from inlay.cli.command import Command, UsageError
from inlay.cli.options import Option
from inlay.cli.process import columns
from inlay.extension import BUNDLED, VARIABLE

_NAME_WIDTH = 26
EXTENSIONS = (
    f"Load these extensions, separated by commas; also {VARIABLE} [default {','.join(BUNDLED)}]"
)


def overview(summaries: Iterable[tuple[str, str]]) -> str:
    """Help of `inlay` itself."""
    rows = list(summaries)
    lines = [
        "usage: inlay COMMAND [OPTION ...]",
        "",
        *_wrapped("Serve language models whose prompts may be embeddings, behind OpenAI's API."),
        "",
        "commands:",
        *(_entry(name, summary) for name, summary in rows),
        "",
        "options:",
        _entry("-h, --help", "Show this, or with a command its options."),
        _entry("--version", "Show the version."),
        _entry("--extensions NAMES", EXTENSIONS),
        "",
        *_wrapped(
            "Every option can also be set in the environment (--max-model-len as "
            "INLAY_MAX_MODEL_LEN) or in a YAML or TOML file given by --config."
        ),
    ]
    return "\n".join(lines) + "\n"


ALL = "all"
"""Word after `--help` that asks for every option."""


def usage(command: Command, about: str = "") -> str:
    """Help of one command.

    Args:
        command: whose.
        about: `ALL`; a word of headings or options, to see those; empty for what is used first, of
            commands with many options.

    Raises:
        UsageError: no option has to do with `about`.
    """
    options = command.options
    shown: list[tuple[str, list[Option]]] = options.sections()
    first = bool(command.first) and not about
    if first:
        shown = [("used first", [options.by_name[name] for name in command.first])]
    elif about and about != ALL:
        shown = _matching(shown, about)
    places = " ".join(
        option.flag if option.field.is_required() else f"[{option.flag}]"
        for option in options.positionals
    )
    tail = f" [-- {command.extra_args}]" if command.extra_args else ""
    lines = [f"usage: inlay {command.name} {places}".rstrip() + f" [OPTION ...]{tail}"]
    if about in ("", ALL):
        lines += ["", *_wrapped(command.summary)]
        if command.details:
            lines += ["", *_wrapped(command.details)]
        if options.positionals:
            lines.append("")
            lines += [_entry(option.flag, _description(option)) for option in options.positionals]
    for title, some in shown:
        lines += ["", f"{title.lower()}:"]
        lines += [_entry(_words(option), _description(option, brief=first)) for option in some]
    if first:
        lines += ["", f"all {len(options.flags)} options, by heading:"]
        for title, some in options.sections():
            lines.append(_entry(title, _cut(", ".join(option.key for option in some))))
    lines += [
        "",
        _entry("--config FILE", "Read options from a YAML or TOML file; also INLAY_CONFIG."),
        _entry("--extensions NAMES", EXTENSIONS),
        _entry("-h, --help [all|WORD]", _HELP)
        if command.first
        else _entry("-h, --help", "Show this."),
    ]
    return "\n".join(lines) + "\n"


_HELP = "Show this, all options, or those of a heading or with a word in their name, such as lora."


def _matching(
    sections: list[tuple[str, list[Option]]], about: str
) -> list[tuple[str, list[Option]]]:
    word = about.lower().replace("_", "-")
    found = [
        (title, [option for option in some if word in title.lower() or word in option.key])
        for title, some in sections
    ]
    found = [(title, some) for title, some in found if some]
    if not found:
        raise UsageError(f"no heading and no option has {about!r} in its name")
    return found


def _words(option: Option) -> str:
    flag = f"--[no-]{option.key}" if option.kind == "switch" else option.flag
    short = f"-{option.short}, " if option.short else ""
    return f"{short}{flag} {option.metavar}".rstrip()


def _cut(names: str) -> str:
    """As many of these as one line takes."""
    lines = textwrap.wrap(names, columns() - _NAME_WIDTH - 6, break_on_hyphens=False)
    return lines[0] if len(lines) == 1 else f"{lines[0]} ..."


def _description(option: Option, *, brief: bool = False) -> str:
    said = option.description
    if brief:
        said = f"{said.split('. ')[0].removesuffix('.')}."
    notes = [
        note for note in (option.bounds, option.default and f"default {option.default}") if note
    ]
    if not option.positional and option.field.is_required():
        notes.append("required")
    return f"{said} [{'; '.join(notes)}]" if notes else said


def _entry(name: str, text: str) -> str:
    width = columns()
    wide = width >= _NAME_WIDTH + 2 + 30
    indent = " " * (_NAME_WIDTH + 2 if wide else 4)
    body = textwrap.wrap(text, width - len(indent), break_on_hyphens=False) or [""]
    head = f"  {name}"
    if wide and len(head) < len(indent):
        return "\n".join([head.ljust(len(indent)) + body[0], *(indent + line for line in body[1:])])
    return "\n".join([head, *(indent + line for line in body)])


def _wrapped(text: str) -> list[str]:
    width = columns()
    return [
        line
        for paragraph in text.split("\n")
        for line in (textwrap.wrap(paragraph, width, break_on_hyphens=False) or [""])
    ]
