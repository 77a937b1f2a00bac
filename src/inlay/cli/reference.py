"""The reference page of the command line, made from the settings classes alone."""

import textwrap
from collections.abc import Iterable, Iterator

from inlay.cli.command import Command
from inlay.cli.commands import commands
from inlay.cli.options import Option
from inlay.cli.vllm_flags import (
    ENGINE_SWITCHES,
    ENGINE_VALUES,
    FORMS,
    HARMLESS_SWITCHES,
    HARMLESS_VALUES,
    INSTEAD,
    NEUTRAL,
    OURS,
    REMOVED,
    WITHOUT_VLLM,
)
from inlay.engine.ranks import SHORT

_HEAD = """\
# Command line

    inlay serve MODEL            serve a model; `inlay serve --help` has the options used first
    inlay serve --help all       all of them; `--help lora` those of a heading or with a word
    inlay demo                   a bundled model
    inlay --help                 all commands

Written by `make reference` from the settings classes.

Every option is a flag, an environment variable and a key of a config file. A flag wins over the
environment, the environment over the file, the file over the default. An unknown option, `INLAY_*`
variable or key is an error that names the nearest known one.

- Flags: `--max-num-seqs 8`, `--max-num-seqs=8` or `--max_num_seqs 8`. A switch is `--enable-x` or
  `--no-enable-x`. A list takes several values, `--served-model-name a b`, or is repeated.
- Integers may have a suffix, as with vLLM: `8k` is 8000, `8K` is 8192; m, g and t likewise.
- Environment: `INLAY_` and the flag in capitals, `INLAY_MAX_NUM_SEQS=8`; a switch `true` or
  `false`, a list separated by spaces. A variable that is set but empty is an error.
- File: `--config serve.yaml` (or `.toml`, or `INLAY_CONFIG`): one flat table, `max-num-seqs: 8`.
- Extensions: `--extensions tools` loads these alone; `''` none. Unless set, all that come with
  inlay are loaded; `inlay doctor` lists those of other packages.

Words after `--` go to the engine untouched; the torch engine takes none. What becomes of vLLM's
other flags is [at the end](#flags-of-vllm-serve).

| exit status | when |
|---|---|
| 0 | it did what was asked; a server: Ctrl-C or SIGTERM stopped it |
| 1 | that failed; a server: its first worker process ended; `bench`: a request failed |
| 2 | the command line, a variable or a file is invalid |
| 130 | it was interrupted; a server: while it loads its model |
| 141 | the reader of its output left, as `head` does |

An error is one line on standard error. Results go to standard output, `-o json` prints them for
programs. A wait of more than a second says what it waits for. `NO_COLOR` keeps `inlay chat` without
colour.
"""


def reference() -> str:
    """The page, Markdown: options that several commands share are shown once."""
    listed = commands()
    users: dict[str, list[str]] = {}
    for command in listed:
        for option in command.options.flags:
            users.setdefault(_row(option), []).append(command.name)
    shared = {row: names for row, names in users.items() if len(names) > 1}
    sections = ("\n".join(_command(command, shared)) for command in listed)
    return "\n".join([_HEAD, *sections, *_vllm_flags()])


def _vllm_flags() -> Iterator[str]:
    yield "## Flags of vllm serve\n"
    yield "Flags that `vllm serve` 0.32 or an earlier one has and `inlay serve` has not. *Read as*:"
    yield "it has another name here. *Ignored*: the server says so and starts. *Refused*: it does"
    yield "not start, and says what to do instead.\n"
    yield "| vLLM's flag | | |"
    yield "|---|---|---|"
    alike: dict[tuple[str, str], list[str]] = {}
    for flag, what, said in sorted(_vllm_rows()):
        alike.setdefault((what, said), []).append(f"`{flag}`")
    yield from (
        f"| {', '.join(flags)} | {what} | {said} |" for (what, said), flags in alike.items()
    )
    yield ""
    yield "Engines other than vLLM refuse these. vLLM takes them, and those marked with *, after"
    yield "`--`, as in `inlay serve MODEL --engine vllm -- --enable-eplb`:\n"
    yield _listed(
        f"`--{name}`"
        for name in sorted(ENGINE_VALUES | ENGINE_SWITCHES)
        if f"--{name}" not in WITHOUT_VLLM
    )
    yield "\nShort flags are read as vLLM reads them:\n"
    yield _listed(f"`{short}` (`{name}`)" for short, name in SHORT.items())


def _vllm_rows() -> Iterator[tuple[str, str, str]]:
    """Flag, what becomes of it, and why."""
    yield "--model", "read as", "MODEL"
    yield from ((flag, "read as", f"`{ours}`") for flag, ours in OURS.items())
    for flag, said in {**INSTEAD, **REMOVED}.items():
        harmless = flag in HARMLESS_SWITCHES or flag in HARMLESS_VALUES
        yield flag, "ignored" if harmless else "refused", f"{said[:1].upper()}{said[1:]}."
    for flag, said in WITHOUT_VLLM.items():
        yield flag, "ignored *", f"{said[:1].upper()}{said[1:]}."
    for flag, values in NEUTRAL.items():
        for value in sorted(values):
            yield f"{flag} {value}", "ignored", "It holds here anyway."
    forms = ", ".join(f"`{form}`" for form in sorted(FORMS))
    said = f"Where FORM is the checkpoint's, as it says itself; else refused. FORM: {forms}."
    yield "--quantization FORM", "ignored", said


def _listed(names: Iterable[str]) -> str:
    return "\n".join(textwrap.wrap(", ".join(names), 100, break_on_hyphens=False))


def _command(command: Command, shared: dict[str, list[str]]) -> Iterator[str]:
    """Its options; of those that a command before it has as well, their names."""
    places = "".join(f" {option.flag}" for option in command.options.positionals)
    yield f"## inlay {command.name}{places}\n"
    yield f"{command.summary} {command.details}\n"
    if command.first:
        names = (f"`--{command.options.by_name[name].key}`" for name in command.first)
        yield f"Used first:\n{_listed(names)}\n"
    if command.options.positionals:
        yield from _table(command.options.positionals)
    elsewhere: dict[str, list[Option]] = {}
    for title, options in command.options.sections():
        own: list[Option] = []
        for option in options:
            first = shared.get(_row(option), [command.name])[0]
            if first == command.name:
                own.append(option)
            else:
                elsewhere.setdefault(first, []).append(option)
        if own:
            yield f"### {title}\n"
            yield from _table(own)
    for first, options in elsewhere.items():
        yield f"As of `inlay {first}`:\n"
        yield _listed(f"`--{option.key}`" for option in options) + "\n"


def _table(options: list[Option]) -> Iterator[str]:
    yield "| option | default | |"
    yield "|---|---|---|"
    yield from map(_row, options)
    yield ""


def _row(option: Option) -> str:
    words = option.flag
    if not option.positional:
        words = f"--[no-]{option.key}" if option.kind == "switch" else f"{words} {option.metavar}"
    short = f"`-{option.short}` " if option.short else ""
    default = "required" if option.field.is_required() else (option.default or "")
    bounds = f" {option.bounds[:1].upper()}{option.bounds[1:]}." if option.bounds else ""
    return f"| {short}`{words}` | {default} | {option.description}{bounds} |"
