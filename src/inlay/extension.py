"""Extensions: packages that add to inlay what the core does not know.

    --extensions tools,audit        also INLAY_EXTENSIONS; unless set, all that come with inlay

Those that come with inlay are packages beside it, `inlay_NAME`. Another distribution names its own
by an entry point of the group `inlay.extensions`, and is loaded only where it is named: a package
that is merely installed adds nothing to a server.
"""

import os
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Final, TypeVar

from inlay.base.errors import InvalidRequestError

API: Final = 1
"""Number of the interface below; it changes when an older extension would no longer work."""
GROUP: Final = "inlay.extensions"
FLAG: Final = "--extensions"
VARIABLE: Final = "INLAY_EXTENSIONS"

# By name and not by entry point: reading those of all that is installed takes longer than all else
# that `inlay --help` does, and a source tree has none.
BUNDLED: Final[Mapping[str, str]] = {
    "stages": "inlay_stages:extension",
    "batches": "inlay_batches:extension",
    "state": "inlay_state:extension",
    "tools": "inlay_tools:extension",
    "audit": "inlay_audit:extension",
}
"""Extensions that come with inlay, in the order in which help lists their commands."""

T = TypeVar("T")


@dataclass(frozen=True)
class OneOf:
    """Metadata of a field whose values are the names in a registry.

    Attributes:
        names: returns them, once they are asked for.
    """

    names: Callable[[], Collection[str]]


@dataclass(frozen=True)
class TaskSpec:
    """A task in words, and the routes that serve it, for errors.

    Attributes:
        task: value of `inlay.messages.request.Task`.
        does: "makes images", of a model of this task.
        does_not: "makes no images", of a model of another.
        routes: the usual one first.
        field: of `ModelCard`, which models of it have; all have it where empty.
    """

    task: str
    does: str
    does_not: str
    routes: tuple[str, ...]
    field: str = ""


@dataclass(frozen=True, eq=False)
class Extension:
    """The parts that one package adds; its module imports no heavy library and no server.

    Attributes:
        name: as `--extensions` takes it.
        api: number of this interface that it was written for.
        chat: `MODULE:NAME` of the `api.generation.chat_kinds.ChatKind` that answers chats which are
            more than text; none where empty. It is imported at the first such chat.
        tasks: those that it serves; one with a field of the card before one without.
        types: `MODULE:NAME` of the types of what is its own in messages, by field: of `ModelCard`
            stage, a `messages.membership.Membership`, image and audio; of `Request` feeds.
        params: `MODULE:NAME` of the types of `Request.params` for tasks that are stages: tagged
            structs. An attribute `work` is what the request weighs at a worker, in place of its
            positions.
        adapters: `MODULE:NAME` of a function of a card, which raises `InvalidRequestError` if LoRA
            adapters are not for that model.
        facts: `MODULE:NAME` of a function of the router and a card, which returns the
            `api.openai.models.ModelFacts` of a model that the extension serves.
        models: `MODULE:NAME` of the `engine.source.ModelSource` of files that it serves.
        worker: `MODULE:NAME` of a function that makes a `worker.part.WorkerPart`.
        fleet: `MODULE:NAME` of a function that makes a `router.fleet_part.FleetPart`.
        engines: `MODULE:NAME` of `engine.spec.EngineSpec` by the name of `--engine`.
        routes: `MODULE:NAME` of `http.app.Routes`, imported where a server starts.
        frontend: `MODULE:NAME` of a function that makes an `http.frontend_part.FrontendPart`.
        options: `MODULE:NAME` of pydantic classes by the settings that they join as a section:
            `engine`, which all commands with an engine have, `serve`, `worker`. The title of a
            class is the heading of its options; `engine.extension_options.section_of` finds it.
        section: of the core's settings, which nobody else reads; `name` unless it is another.
        commands: `MODULE:NAME` of a sequence of `cli.command.Command`; none where empty.
    """

    name: str
    api: int = 1
    tasks: tuple[TaskSpec, ...] = ()
    chat: str = ""
    types: str = ""
    params: str = ""
    adapters: str = ""
    facts: str = ""
    models: str = ""
    engines: str = ""
    fleet: str = ""
    worker: str = ""
    routes: str = ""
    frontend: str = ""
    options: str = ""
    section: str = ""
    commands: str = ""


def extensions() -> tuple[Extension, ...]:
    """Return those of this process and of those it starts: the environment names them.

    Raises:
        InvalidRequestError: one that is named is not installed, or does not fit.
    """
    return load(os.environ.get(VARIABLE))


def known() -> tuple[Extension, ...]:
    """Return those of this process, and all others that come with inlay.

    Another Python has no more than what it was lent.
    """
    return _known(os.environ.get(VARIABLE))


@cache
def _known(named: str | None) -> tuple[Extension, ...]:
    there = [name for name, path in BUNDLED.items() if find_spec(path.partition(":")[0])]
    return tuple(dict.fromkeys([*load(",".join(there)), *load(named)]))


@cache
def load(named: str | None) -> tuple[Extension, ...]:
    """Load extensions: those that come with inlay first, others in the order of their names.

    Args:
        named: names, separated by commas; None takes all that come with inlay.

    Raises:
        InvalidRequestError: one is not installed, two have one name, or one was written for another
            interface.
    """
    names = {*BUNDLED} if named is None else {name.strip() for name in named.split(",")} - {""}
    wanted = [name for name in BUNDLED if name in names]
    found: list[Extension] = [_object(BUNDLED[name]) for name in wanted]
    if others := names - {*BUNDLED}:
        found += [_foreign(name) for name in sorted(others)]
    return tuple(found)


def parts(field: str, given: tuple[Extension, ...] | None = None) -> Sequence[tuple[str, Any]]:
    """Return what extensions have for a field, imported, with their names.

    They are those of this process unless some are given.
    """
    return _parts(extensions() if given is None else given, field)


@cache
def _parts(found: tuple[Extension, ...], field: str) -> Sequence[tuple[str, Any]]:
    given = ((extension.name, getattr(extension, field)) for extension in found)
    return [(name, _object(path)) for name, path in given if path]


def type_of(field: str, otherwise: object) -> Any:
    """Return the type of a field of messages: that of an extension, or `otherwise` without one."""
    return merged("field", parts("types")).get(field, otherwise)


def lend(folder: Path) -> None:
    """Put the extensions of this process into an empty folder of another Python's path.

    They are links; those that do not come with inlay are also told of, as an installed package is.
    """
    names = {extension.name for extension in extensions()}
    modules = [path for name, path in BUNDLED.items() if name in names]
    if others := names - {*BUNDLED}:
        from importlib.metadata import entry_points

        for point in entry_points(group=GROUP):
            if point.name in others and point.dist is not None:
                modules.append(point.value)
                name, version = point.dist.name, point.dist.version
                about = folder / f"{name.replace('-', '_')}-{version}.dist-info"
                about.mkdir()
                said = f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n"
                (about / "METADATA").write_text(said, encoding="utf-8")
                told = f"[{GROUP}]\n{point.name} = {point.value}\n"
                (about / "entry_points.txt").write_text(told, encoding="utf-8")
    for top in {path.partition(":")[0].partition(".")[0] for path in modules}:
        package = Path(str(import_module(top).__file__)).resolve().parent
        (folder / top).symlink_to(package, target_is_directory=True)


def installed() -> dict[str, list[str]]:
    """Distributions that have an extension beside those that come with inlay, by its name."""
    from importlib.metadata import entry_points

    found: dict[str, list[str]] = {}
    for point in entry_points(group=GROUP):
        distribution = "?" if point.dist is None else f"{point.dist.name} {point.dist.version}"
        found.setdefault(point.name, []).append(distribution)
    return found


def merged(what: str, given: Iterable[tuple[str, Mapping[str, T]]]) -> dict[str, T]:
    """Join what the core and its extensions give of one kind, by name.

    Args:
        what: word for one of them: "command".
        given: who gives, and what.

    Raises:
        InvalidRequestError: two give one name.
    """
    found: dict[str, T] = {}
    givers: dict[str, str] = {}
    for giver, items in given:
        for name, item in items.items():
            if name in found:
                raise InvalidRequestError(
                    f"{what} {name!r} is given twice: by {givers[name]} and by {giver}"
                )
            found[name], givers[name] = item, giver
    return found


def _foreign(name: str) -> Extension:
    from importlib.metadata import entry_points

    distributions = installed()
    if name not in distributions:
        beside = ", ".join(sorted(distributions)) or "none"
        raise InvalidRequestError(
            f"{FLAG}: no extension {name!r}; inlay has {', '.join(sorted(BUNDLED))}; "
            f"installed beside it: {beside}"
        )
    if len(distributions[name]) > 1:
        raise InvalidRequestError(
            f"extension {name!r} is given twice: by {' and by '.join(distributions[name])}"
        )
    (point,) = entry_points(group=GROUP, name=name)
    extension = point.load()
    if not isinstance(extension, Extension) or extension.name != name:
        raise InvalidRequestError(
            f"extension {name!r} of {distributions[name][0]}: {point.value} is not an "
            f"inlay.extension.Extension of that name"
        )
    if extension.api != API:
        raise InvalidRequestError(
            f"extension {name!r} of {distributions[name][0]} is for interface {extension.api}, "
            f"this inlay has {API}"
        )
    return extension


def _object(path: str) -> Any:
    module, _, attribute = path.partition(":")
    return getattr(import_module(module), attribute)
