"""Reading of settings: flags over environment over config file over defaults.

Each source gives raw values by field name, with the name that the user wrote. Pydantic checks the
merged values once. All errors are one line, in inlay's words, and name the source of the value.
"""

import difflib
import logging
import re
import tomllib
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import reduce
from pathlib import Path
from typing import Any, cast

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from inlay.base.errors import why_unusable
from inlay.cli.command import Command, UsageError
from inlay.cli.options import ENVIRONMENT_PREFIX, Option, Options
from inlay.cli.vllm_flags import FORMS, OURS, Unknown, advice, num_values, passed_over
from inlay.engine.ranks import split_flag
from inlay.extension import FLAG as EXTENSIONS_FLAG
from inlay.extension import VARIABLE as EXTENSIONS_VARIABLE

_NUMBER = re.compile(r"(\d+(?:\.\d+)?)([kKmMgGtT])")
_POWERS = {"k": 1, "m": 2, "g": 3, "t": 4}


def expand_suffix(text: str) -> str:
    """Write out the multiplier of an integer: `8k` is 8000, `8K` is 8192, `25.6k` is 25600.

    Lower-case k, m, g, t are powers of 1000, upper-case K, M, G, T of 1024, as in vLLM's
    `human_readable_int`.

    Args:
        text: any; what has no such suffix comes back as it is.

    Raises:
        ValueError: a decimal fraction of a power of 1024.
    """
    match = _NUMBER.fullmatch(text.strip())
    if match is None:
        return text
    number, suffix = match.groups()
    if suffix.islower():
        return str(int(float(number) * 1000 ** _POWERS[suffix]))
    if "." in number:
        raise ValueError(f"{suffix} takes whole numbers, did you mean {number}{suffix.lower()}?")
    return str(int(number) * 1024 ** _POWERS[suffix.lower()])


CONFIG_FLAG = "--config"
CONFIG_VARIABLE = "INLAY_CONFIG"
_OF_ALL = (CONFIG_VARIABLE, EXTENSIONS_VARIABLE)
"""Variables that are no option's: every command reads them."""
_logger = logging.getLogger(__name__)
_HELP_FLAGS = ("--help", "-h")


@dataclass(frozen=True)
class RawValue:
    """A raw value and its source: `--port`, `INLAY_PORT`, `port in serve.yaml`."""

    value: object
    source: str


@dataclass
class ParsedArgs:
    """A command line, taken apart but not yet checked.

    Attributes:
        given: field name to value.
        config: the file named by `--config`.
        extra_args: the words after `--`.
        help: what help was asked for: a word, or "" where none was named; None if it was not.
        unknown: flags that the command does not have.
    """

    given: dict[str, RawValue] = field(default_factory=dict)
    unknown: list[Unknown] = field(default_factory=list)
    config: str | None = None
    extra_args: list[str] = field(default_factory=list)
    help: str | None = None


def read(
    command: Command,
    words: ParsedArgs,
    environ: Mapping[str, str],
    known_variables: Collection[str],
) -> BaseModel:
    """The settings of `command`.

    Logs a warning for each flag of vLLM that it does without.

    Raises:
        UsageError: anything is unknown, missing or out of bounds.
    """
    given = from_environment(command.options, environ, known_variables)
    if words.config is not None:
        given = from_file(command.options, Path(words.config)) | given
    elif CONFIG_VARIABLE in environ:
        file = Path(environ[CONFIG_VARIABLE])
        found = from_file(command.options, file, known_variables if command.borrows else ())
        if command.borrows:
            found = {name: value for name, value in found.items() if name in command.borrows}
        given = found | given
    given |= words.given
    unknown = _not_passed_over(command, words.unknown, given)
    if unknown:
        raise UsageError(_unknown_flags(command, unknown, given))
    _pass_over_form(command, given)
    for option in command.options.positionals:
        if option.field.is_required() and option.name not in given:
            raise UsageError(f"{option.flag} is missing{command.suggest()}")
    return _checked(command, given)


def parse(command: Command, argv: Sequence[str]) -> ParsedArgs:
    """Take a command line apart.

    Raises:
        UsageError: a missing value, a word too many.
    """
    words = ParsedArgs()
    before, words.extra_args = split_extra_args(argv)
    flags = {option.flag: option for option in command.options.flags}
    flags |= {f"-{option.short}": option for option in command.options.flags if option.short}
    flags |= {f"--{option.key}": option for option in command.options.positionals}
    places = list(command.options.positionals)
    index = 0
    while index < len(before):
        word = before[index]
        index += 1
        if not word.startswith("-") or word == "-":
            if not places:
                raise UsageError(f"unexpected word {word!r}")
            option = places.pop(0)
            _place(words.given, option, RawValue(word, option.flag))
            continue
        name, written, value = split_flag(word)
        joined = value is not None
        name = name if name in flags else OURS.get(name, name)
        if name in _HELP_FLAGS:
            words.help = value or " ".join(_following(before, index))
            return words
        following = _following(before, index) if value is None else [value]
        if name == CONFIG_FLAG:
            words.config = _one(written, following)
            index += not joined
            continue
        switch = (
            flags.get("--" + name.removeprefix("--no-"))
            if name.startswith("--no-")
            else flags.get(name)
        )
        if switch is not None and switch.kind == "switch":
            if joined:
                raise UsageError(f"{written} takes no value, got {value!r}")
            words.given[switch.name] = RawValue(not name.startswith("--no-"), written)
            continue
        found = flags.get(name)
        if found is None:
            count = num_values(name, len(following))
            words.unknown.append(Unknown(written, following[0] if count else None))
            index += 0 if joined else count
            continue
        if found.kind == "list":
            index += 0 if joined else len(following)
            _extend(words.given, found, written, following)
        elif found.positional:
            _place(words.given, found, RawValue(_one(written, following), written))
            index += not joined
        else:
            words.given[found.name] = RawValue(_one(written, following), written)
            index += not joined
    if words.extra_args and not command.extra_args:
        raise UsageError(f"takes no further arguments, got {' '.join(words.extra_args)!r} after --")
    return words


def from_environment(
    options: Options, environ: Mapping[str, str], known: Collection[str]
) -> dict[str, RawValue]:
    """Read the values that the environment sets, by field name.

    Raises:
        UsageError: an `INLAY_*` variable that no command reads, or an empty one.
    """
    variables = options.variables
    given: dict[str, RawValue] = {}
    ours = [name for name in sorted(environ) if name.startswith(ENVIRONMENT_PREFIX)]
    unknown = [name for name in ours if name not in known and name not in _OF_ALL]
    if unknown:
        raise UsageError(
            "; ".join(
                _unknown("environment variable", name, [*known, *_OF_ALL]) for name in unknown
            )
        )
    for name in ours:
        if name not in variables:
            continue
        value = environ[name]
        if not value:
            raise UsageError(f"{name} is set but empty: unset it or give it a value")
        option = variables[name]
        given[option.name] = RawValue(value.split() if option.kind == "list" else value, name)
    return given


def from_file(options: Options, path: Path, others: Collection[str] = ()) -> dict[str, RawValue]:
    """Read the values that a YAML or TOML file sets, by field name.

    Args:
        options: that are read.
        path: of the file.
        others: variables of options of other commands, whose keys are passed over.

    Raises:
        UsageError: the file cannot be read, is not a flat table, or has an unknown key.
    """
    given: dict[str, RawValue] = {}
    unknown: list[str] = []
    keys = [option.key for option in options.by_name.values()]
    for key, value in _table(path).items():
        name = str(key).replace("-", "_")
        option = options.by_name.get(name)
        if option is None:
            if f"{ENVIRONMENT_PREFIX}{name.upper()}" in others:
                continue
            flag = Unknown(f"--{key}", str(value))
            reason = passed_over(flag, None)
            if reason is not None:
                _logger.warning("%s: %s has no effect: %s", path, key, reason)
                continue
            said, left = advice([flag], None)
            unknown += [*said, *(_unknown("key", str(key), keys) for _ in left)]
            continue
        if option.name in given:
            raise UsageError(f"{path}: {option.key} is given twice")
        wanted_list = option.kind == "list" and not isinstance(value, list)
        given[option.name] = RawValue([value] if wanted_list else value, f"{option.key} in {path}")
    if unknown:
        raise UsageError(f"{path}: {'; '.join(unknown)}")
    return given


def _table(path: Path) -> dict[object, object]:
    suffix = path.suffix.lower()
    if suffix not in {".yaml", ".yml", ".toml"}:
        raise UsageError(f"config file {str(path)!r}: the name must end in .yaml, .yml or .toml")
    try:
        text = path.read_text(encoding="utf-8-sig")
        table = tomllib.loads(text) if suffix == ".toml" else yaml.safe_load(text)
    except OSError as error:
        raise UsageError(f"config file {str(path)!r}: {why_unusable(error)}") from error
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = "" if mark is None else f" line {mark.line + 1}, column {mark.column + 1}:"
        raise UsageError(f"config file {str(path)!r}:{where} {error.problem}") from error
    except (UnicodeDecodeError, tomllib.TOMLDecodeError, yaml.YAMLError) as error:
        raise UsageError(f"config file {str(path)!r}: {why_unusable(error)}") from error
    if table is None:
        return {}
    if not isinstance(table, dict):
        raise UsageError(
            f"config file {str(path)!r}: must be a table of options, got {type(table).__name__}"
        )
    return cast("dict[object, object]", table)


def split_extra_args(argv: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the words before the first `--`, and those after it."""
    words = list(argv)
    if "--" not in words:
        return words, []
    at = words.index("--")
    return words[:at], words[at + 1 :]


def _following(words: Sequence[str], start: int) -> list[str]:
    """The words from `start` up to the next flag. A negative number is a value."""
    values = []
    for word in words[start:]:
        is_flag = word.startswith("-") and word != "-" and not word[1:2].isdigit()
        if is_flag:
            break
        values.append(word)
    return values


def _place(given: dict[str, RawValue], option: Option, value: RawValue) -> None:
    """Set an option that has a place, and may have its name before it as well."""
    earlier = given.get(option.name)
    if earlier is not None:
        raise UsageError(f"{option.flag} is given twice: {earlier.value!r} and {value.value!r}")
    given[option.name] = value


def _one(name: str, following: Sequence[str]) -> str:
    if not following:
        raise UsageError(f"{name} needs a value")
    return following[0]


def _extend(
    given: dict[str, RawValue], option: Option, name: str, following: Sequence[str]
) -> None:
    if not following:
        raise UsageError(f"{name} needs at least one value")
    earlier = given.get(option.name)
    before = cast("list[str]", earlier.value) if earlier is not None else []
    given[option.name] = RawValue([*before, *following], name)


def _spellings(options: Iterable[Option]) -> list[str]:
    names = [CONFIG_FLAG, EXTENSIONS_FLAG, "--help"]
    for option in options:
        names.append(option.flag)
        if option.kind == "switch":
            names.append(f"--no-{option.key}")
    return names


def _serves(command: Command) -> bool:
    rooms = {option.path[0] for option in command.options.by_name.values() if option.path}
    return not rooms.isdisjoint({"engine", "frontend"})


def _engine(command: Command, given: Mapping[str, RawValue]) -> str | None:
    """The engine that a command runs, or None."""
    engine = command.options.by_name.get("engine")
    if engine is None:
        return None
    return str(given["engine"].value if "engine" in given else engine.default)


def _not_passed_over(
    command: Command, unknown: Sequence[Unknown], given: Mapping[str, RawValue]
) -> list[Unknown]:
    """The unknown flags that a command must not run without; a warning tells of the others."""
    if not _serves(command):
        return list(unknown)
    kept = []
    for flag in unknown:
        reason = passed_over(flag, _engine(command, given))
        if reason is None:
            kept.append(flag)
        else:
            _logger.warning("%s has no effect: %s", flag.name, reason)
    return kept


def _pass_over_form(command: Command, given: dict[str, RawValue]) -> None:
    """Drop vLLM's `--quantization` where it names the form that the checkpoint has; say so.

    Raises:
        UsageError: the checkpoint has another form.
    """
    item = given.get("quantization")
    form = None if item is None else FORMS.get(str(item.value))
    if item is None or form is None or "model" not in given:
        return
    # Late: what reads a model takes its time to import.
    from inlay.cli.model_directory import stored_form

    model, revision = str(given["model"].value), given.get("revision")
    stored = stored_form(model, None if revision is None else str(revision.value))
    if stored is None or FORMS.get(stored, stored) != form:
        is_ = "not quantised" if stored is None else f"stored as {stored}"
        own = "" if _engine(command, given) == "vllm" else "--engine vllm "
        raise UsageError(
            f"{item.source} {item.value}: {model} is {is_}; allowed: nothing, as a checkpoint says "
            "its form itself; int8 or q4_k, which round a plain one as it is loaded, on a CPU; "
            f"vLLM's own: {own}-- --quantization {item.value}"
        )
    _logger.warning("%s has no effect: %s says itself that it is %s", item.source, model, stored)
    del given["quantization"]


def _unknown_flags(
    command: Command, unknown: Sequence[Unknown], given: Mapping[str, RawValue]
) -> str:
    """Error text for unknown flags: for each, what to write in its place."""
    said, others = advice(unknown, _engine(command, given)) if _serves(command) else ([], unknown)
    known = _spellings(command.options.flags)
    return "; ".join([*said, *(_unknown("option", flag.name, known) for flag in others)])


def _unknown(what: str, name: str, known: Iterable[str]) -> str:
    # All variables begin alike, which makes none of them a likely slip for another.
    bare = {other.removeprefix(ENVIRONMENT_PREFIX): other for other in known}
    if name.startswith("--disable-"):
        # The nearest name would be that of the opposite.
        rest = name.removeprefix("--disable-")
        negated = [flag for flag in (f"--no-{rest}", f"--no-enable-{rest}") if flag in bare]
        return f"unknown {what} {name}" + (f", did you mean {negated[0]}?" if negated else "")
    near = difflib.get_close_matches(name.removeprefix(ENVIRONMENT_PREFIX), list(bare), n=1)
    return f"unknown {what} {name}" + (f", did you mean {bare[near[0]]}?" if near else "")


def _checked(command: Command, given: Mapping[str, RawValue]) -> BaseModel:
    options = command.options.by_name
    values: dict[str, Any] = {}
    sections = {
        option.path: reduce(lambda inside, name: inside.setdefault(name, {}), option.path, values)
        for option in options.values()
    }
    for name, item in given.items():
        sections[options[name].path][name] = _expanded(options[name], item)
    try:
        return command.settings.model_validate(values)
    except ValidationError as error:
        raise UsageError("; ".join(_errors(options, given, error))) from error


def _errors(
    options: Mapping[str, Option], given: Mapping[str, RawValue], error: ValidationError
) -> Iterator[str]:
    """One error for each option, however many types its value was tried as."""
    found: dict[str, tuple[Option | None, list[str]]] = {}
    for problem in error.errors():
        # A section may be called as one of its options is ("engine"): the innermost name decides.
        parts = [str(part) for part in reversed(problem["loc"]) if str(part) in options]
        option = options[parts[0]] if parts else None
        _, messages = found.setdefault(parts[0] if parts else "", (option, []))
        message = _in_words(problem)
        if message not in messages:
            messages.append(message)
    for option, messages in found.values():
        if option is None:
            yield from messages
            continue
        alternatives = [message.removeprefix(_MUST) for message in messages]
        joined = " or ".join(alternatives) if all(m.startswith(_MUST) for m in messages) else ""
        yield format_error(option, given, _MUST + joined if joined else "; ".join(messages))


_MUST = "must be "
_WORDS: Mapping[str, str] = {
    "bool_parsing": _MUST + "true or false",
    "bool_type": _MUST + "true or false",
    "float_parsing": _MUST + "a number",
    "float_type": _MUST + "a number",
    "finite_number": _MUST + "a finite number",
    "greater_than": _MUST + "more than {gt}",
    "greater_than_equal": _MUST + "at least {ge}",
    "int_from_float": _MUST + "an integer",
    "int_parsing": _MUST + "an integer",
    "int_type": _MUST + "an integer",
    "less_than": _MUST + "less than {lt}",
    "less_than_equal": _MUST + "at most {le}",
    "list_type": _MUST + "a list",
    "literal_error": _MUST + "{expected}",
    "multiple_of": _MUST + "a multiple of {multiple_of}",
    "path_type": _MUST + "a path",
    "string_type": _MUST + "text",
}
"""Error messages by pydantic's type of error; its own are for programmers."""


def _in_words(problem: ErrorDetails) -> str:
    words = _WORDS.get(problem["type"])
    if words is not None:
        return words.format(**problem.get("ctx", {}))
    message = problem["msg"].removeprefix("Value error, ")
    return message[:1].lower() + message[1:]


def _expanded(option: Option, item: RawValue) -> object:
    """The value, the suffix of an integer written out."""
    if not option.takes_integers or not isinstance(item.value, str):
        return item.value
    try:
        return expand_suffix(item.value)
    except ValueError as error:
        raise UsageError(f"{item.source}: {error}, got {item.value!r}") from error


def format_error(option: Option, given: Mapping[str, RawValue], message: str) -> str:
    """Return an error of an option's value, naming the source of the value."""
    item = given.get(option.name)
    if item is None:
        return f"{option.flag} is missing"
    return f"{item.source}: {message}" + ("" if option.secret else f", got {_shown(item.value)}")


def _shown(value: object) -> str:
    return repr(value if not isinstance(value, list) else " ".join(str(part) for part in value))
