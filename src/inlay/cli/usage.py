"""Text of `--help`, in the terminal's width."""

import textwrap
from collections.abc import Iterable

from inlay.cli.command import Command
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


def usage(command: Command) -> str:
    """Help of one command: all its options under their headings."""
    places = " ".join(
        option.flag if option.field.is_required() else f"[{option.flag}]"
        for option in command.options.positionals
    )
    tail = f" [-- {command.rest}]" if command.rest else ""
    lines = [f"usage: inlay {command.name} {places}".rstrip() + f" [OPTION ...]{tail}", ""]
    lines += _wrapped(command.summary)
    if command.details:
        lines += ["", *_wrapped(command.details)]
    if command.options.positionals:
        lines.append("")
        lines += [
            _entry(option.flag, _description(option)) for option in command.options.positionals
        ]
    for title, options in command.options.sections():
        lines += ["", f"{title.lower()}:"]
        lines += [_entry(_words(option), _description(option)) for option in options]
    lines += [
        "",
        _entry("--config FILE", "Read options from a YAML or TOML file; also INLAY_CONFIG."),
        _entry("--extensions NAMES", EXTENSIONS),
        _entry("-h, --help", "Show this."),
    ]
    return "\n".join(lines) + "\n"


def _words(option: Option) -> str:
    flag = f"--[no-]{option.key}" if option.kind == "switch" else option.flag
    short = f"-{option.short}, " if option.short else ""
    return f"{short}{flag} {option.metavar}".rstrip()


def _description(option: Option) -> str:
    said = option.description
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
