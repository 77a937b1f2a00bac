"""The reference page of the command line, made from the settings classes alone."""

import textwrap
from collections.abc import Iterable, Iterator

from inlay.cli.command import Command
from inlay.cli.commands import commands
from inlay.cli.options import Option
from inlay.cli.vllm_flags import (
    ENGINE_SWITCHES,
    ENGINE_VALUES,
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

Written by `scripts/reference.py` from the settings classes; `make reference` writes it again.

Every option of a command is a flag, an environment variable and a key of a config file. A flag wins
over the environment, the environment over the file, the file over the default. An unknown option,
`INLAY_*` variable or key is an error that names the nearest known one.

- Flags: `--max-num-seqs 8`, `--max-num-seqs=8` or `--max_num_seqs 8`. A switch is `--enable-x` or
  `--no-enable-x`. A list takes several values, `--served-model-name a b`, or is repeated.
- Integers may have a suffix, as with vLLM: `--max-model-len 8k` is 8000, `8K` is 8192; m, g and t
  likewise.
- Environment: `INLAY_MAX_NUM_SEQS=8`, a switch `true` or `false`, a list separated by spaces. A
  variable that is set but empty is an error.
- File: `--config serve.yaml` (or `.toml`, or `INLAY_CONFIG`): one flat table, `max-num-seqs: 8`.
- Extensions: `--extensions tools` (or `INLAY_EXTENSIONS`) loads these alone; `''` loads none.
  Unless set, all that come with inlay are loaded. Those of other packages are loaded where they are
  named; `inlay doctor` lists them.

Words after `--` go to the engine untouched; the torch engine takes none. What becomes of flags of
vLLM that are not listed here is [at the end](#flags-of-vllm-serve).

| exit status | when |
|---|---|
| 0 | it did what was asked; a server: Ctrl-C or SIGTERM stopped it |
| 1 | that failed; a server: its first worker process ended; `bench`: a request failed |
| 2 | the command line, a variable or a file is invalid |
| 130 | it was interrupted; a server: while it loads its model |
| 141 | who read its output left before the end, as `head` does |

An error is one line on standard error. A server that is stopped lets open requests end first; a
second signal ends them.

Results go to standard output, `-o json` (`--output-format json`) prints them for programs, and
everything else goes to standard error. A wait of more than a second says what it waits for: on a
terminal in one line that is wiped out in the end, elsewhere in a line now and then. `NO_COLOR` in
the environment keeps answers of `inlay chat` without colour.
"""


def reference() -> str:
    """The page, Markdown."""
    return "\n".join(
        [_HEAD, *("\n".join(_command(command)) for command in commands()), *_vllm_flags()]
    )


def _vllm_flags() -> Iterator[str]:
    yield "## Flags of vllm serve\n"
    yield "Flags that `vllm serve` 0.32 or an earlier one has and `inlay serve` has not. *Read as*:"
    yield "it has another name here. *Ignored*: the server says so and starts. *Refused*: it does"
    yield "not start, and says what to do instead.\n"
    yield "| vLLM's flag | | |"
    yield "|---|---|---|"
    yield from (f"| `{flag}` | {what} | {said} |" for flag, what, said in sorted(_vllm_rows()))
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


def _listed(names: Iterable[str]) -> str:
    return "\n".join(textwrap.wrap(", ".join(names), 100, break_on_hyphens=False))


def _command(command: Command) -> Iterator[str]:
    places = "".join(f" {option.flag}" for option in command.options.positionals)
    yield f"## inlay {command.name}{places}\n"
    yield f"{command.summary} {command.details}\n"
    if command.options.positionals:
        yield from _table(command.options.positionals)
    for title, options in command.options.sections():
        yield f"### {title}\n"
        yield from _table(options)


def _table(options: list[Option]) -> Iterator[str]:
    yield "| option | variable | default | |"
    yield "|---|---|---|---|"
    for option in options:
        words = option.flag
        if not option.positional:
            words = (
                f"--[no-]{option.key}" if option.kind == "switch" else f"{words} {option.metavar}"
            )
        short = f"`-{option.short}` " if option.short else ""
        default = "required" if option.field.is_required() else (option.default or "")
        bounds = f" {option.bounds[:1].upper()}{option.bounds[1:]}." if option.bounds else ""
        said = f"{option.description}{bounds}"
        yield f"| {short}`{words}` | `{option.variable}` | {default} | {said} |"
    yield ""
