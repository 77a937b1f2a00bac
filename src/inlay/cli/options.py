"""Options: fields of a settings class as flags, environment variables and keys of a file.

A settings class is a pydantic model. Its fields are values, or sections: models of the rooms a
command joins, which may have sections of their own. All values in them are options of the command
itself: one field is one option, described by the docstring below it, under the title of the field
or of the nearest section that has one. A section with many has `headings`: a field to the heading
that begins with it.

    max_num_seqs: int        --max-num-seqs N          INLAY_MAX_NUM_SEQS        max-num-seqs: N
                             (also --max_num_seqs; N may be 8k or 8K)
    enable_prefix_caching    --[no-]enable-prefix-caching
    api_key: list[str]       --api-key A B, or repeated; separated by spaces in the environment
"""

import ast
import inspect
import textwrap
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import pairwise
from typing import Annotated, Any, Literal

from pydantic import BaseModel, SecretStr
from pydantic.fields import FieldInfo

from inlay.extension import OneOf

Kind = Literal["value", "switch", "list"]

ENVIRONMENT_PREFIX = "INLAY_"

_METAVARS: dict[Any, str] = {int: "N", float: "NUMBER", str: "TEXT", SecretStr: "TEXT"}


def _bare(annotation: Any) -> Any:
    return (
        typing.get_args(annotation)[0] if typing.get_origin(annotation) is Annotated else annotation
    )


def _word(element: Any) -> str:
    if typing.get_origin(element) is Literal:
        return "|".join(str(choice) for choice in typing.get_args(element))
    return _METAVARS.get(_bare(element), "FILE")


@cache
def _descriptions(settings: type[BaseModel]) -> dict[str, str]:
    """Docstrings below the fields of a settings class and its bases, by field.

    pydantic's `use_attribute_docstrings` would read them at each start of a command.
    """
    found: dict[str, str] = {}
    for base in reversed(settings.mro()[: settings.mro().index(BaseModel)]):
        (parsed,) = ast.parse(textwrap.dedent(inspect.getsource(base))).body
        for field, said in pairwise(typing.cast("ast.ClassDef", parsed).body):
            match field, said:
                case (
                    ast.AnnAssign(target=ast.Name(id=name)),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    found[name] = " ".join(text.split())
    return found


_SHORT = {"output_format": "o", "output_file": "o"}
"""One-letter flags by field, the same in all commands."""


@dataclass(frozen=True)
class Option:
    """One field of a settings class as its user meets it.

    Attributes:
        name: the field's name, which is also its key in a config file.
        path: names of the sections that hold the field, from the outermost; empty for a field of
            the settings class itself.
        title: heading under which it is listed.
        field: where type, default and bounds come from.
        settings: class whose field it is.
        positional: given by its place instead of a flag.
        short: one-letter flag, or None.
    """

    name: str
    path: tuple[str, ...]
    title: str
    field: FieldInfo
    settings: type[BaseModel]
    positional: bool = False
    short: str | None = None

    @property
    def flag(self) -> str:
        """`--max-num-seqs`, or `MODEL` for a positional."""
        return self.name.upper() if self.positional else f"--{self.key}"

    @property
    def key(self) -> str:
        """The name in a config file; underscores are read as well."""
        return self.name.replace("_", "-")

    @property
    def variable(self) -> str:
        """The environment variable."""
        return ENVIRONMENT_PREFIX + self.name.upper()

    @cached_property
    def type(self) -> Any:
        """The annotation without `| None`."""
        annotation = self.field.annotation
        if typing.get_origin(annotation) in (typing.Union, types.UnionType):
            kept = [part for part in typing.get_args(annotation) if part is not type(None)]
            if len(kept) == 1:
                return kept[0]
        return annotation

    @property
    def element(self) -> Any:
        """The type of one value: of a list's elements, or the type itself."""
        return _bare(typing.get_args(self.type)[0] if self.kind == "list" else self.type)

    @property
    def choices(self) -> Sequence[str]:
        """Values that it may have; empty where they are not a few names."""
        for registered in self.field.metadata:
            if isinstance(registered, OneOf):
                return list(registered.names())
        if typing.get_origin(self.element) is Literal:
            return [str(choice) for choice in typing.get_args(self.element)]
        return ()

    @property
    def description(self) -> str:
        """One sentence or more."""
        return _descriptions(self.settings).get(self.name, "")

    @property
    def takes_integers(self) -> bool:
        """True if one value of it may be an integer."""
        parts = typing.get_args(self.element) or (self.element,)
        return self.kind == "value" and any(_bare(part) is int for part in parts)

    @property
    def secret(self) -> bool:
        """True if its values must not be shown."""
        return self.element is SecretStr

    @property
    def kind(self) -> Kind:
        """Number of words it takes on a command line: one, none, or any number."""
        if self.type is bool:
            return "switch"
        return "list" if typing.get_origin(self.type) is list else "value"

    @property
    def metavar(self) -> str:
        """Placeholder of the value in help: `N`, `{auto,cpu,cuda}`, `N|auto`, `TEXT ...`.

        Empty for a switch.
        """
        if self.kind == "switch":
            return ""
        element = self.element
        if choices := self.choices:
            word = "{" + ",".join(choices) + "}"
        elif typing.get_origin(element) in (typing.Union, types.UnionType):
            word = "|".join(_word(part) for part in typing.get_args(element))
        else:
            word = _word(element)
        return f"{word} ..." if self.kind == "list" else word

    @property
    def default(self) -> str | None:
        """The default as one would write it, or None where it is required, empty or unset."""
        value = self.field.get_default(call_default_factory=True, validated_data={})
        if self.field.is_required() or value is None or value in ("", []):
            return None
        if isinstance(value, bool):
            return "on" if value else "off"
        return str(value)

    @property
    def bounds(self) -> str | None:
        """`1 to 4096`, `at least 16, a multiple of 16`.

        None where any value of the type will do.
        """
        limits = {
            name: value
            for constraint in self.field.metadata
            for name in ("ge", "gt", "le", "lt", "multiple_of")
            if (value := getattr(constraint, name, None)) is not None
        }
        said = []
        if "ge" in limits and "le" in limits:
            said.append(f"{limits['ge']} to {limits['le']}")
        else:
            words = {"ge": "at least", "gt": "more than", "le": "at most", "lt": "less than"}
            said += [f"{word} {limits[name]}" for name, word in words.items() if name in limits]
        if "multiple_of" in limits:
            said.append(f"a multiple of {limits['multiple_of']}")
        return ", ".join(said) or None


@dataclass(frozen=True)
class Options:
    """All options of one command, in the order of its settings class."""

    by_name: Mapping[str, Option]

    @classmethod
    def of(cls, settings: type[BaseModel], *, positional: tuple[str, ...] = ()) -> "Options":
        """The options of `settings`.

        Raises:
            ValueError: two sections have a field of the same name, or a name here is no field's.
        """
        found: dict[str, Option] = {}

        def walk(owner: type[BaseModel], path: tuple[str, ...], title: str) -> None:
            headings: Mapping[str, str] = getattr(owner, "headings", {})
            for name, field in owner.model_fields.items():
                title = headings.get(name, title)
                section = field.annotation
                if isinstance(section, type) and issubclass(section, BaseModel):
                    walk(section, (*path, name), field.title or name.capitalize())
                elif name in found:
                    raise ValueError(f"{settings.__name__} has two options named {name!r}")
                else:
                    place, short = name in positional, _SHORT.get(name)
                    heading = field.title or title
                    found[name] = Option(name, path, heading, field, owner, place, short)

        walk(settings, (), "Options")
        unknown = sorted({*positional} - set(found))
        if unknown:
            raise ValueError(f"{settings.__name__} has no field {unknown[0]!r}")
        return cls(found)

    @property
    def positionals(self) -> list[Option]:
        """Those given by their place."""
        return [option for option in self.by_name.values() if option.positional]

    @property
    def flags(self) -> list[Option]:
        """Those given by a flag."""
        return [option for option in self.by_name.values() if not option.positional]

    @property
    def variables(self) -> dict[str, Option]:
        """Environment variable to option."""
        return {option.variable: option for option in self.by_name.values()}

    def sections(self) -> list[tuple[str, list[Option]]]:
        """(heading, flags under it), in order."""
        titles = dict.fromkeys(option.title for option in self.flags)
        return [
            (title, [option for option in self.flags if option.title == title]) for title in titles
        ]
