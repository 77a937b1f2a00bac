"""Options that extensions declare: sections of settings classes, as if they stood there.

    @with_extensions("engine")
    class EngineSettings(BaseModel): ...

has a section for each extension of which `Extension.options` names one for "engine". Those that
come with inlay are there whether they are loaded or not: what uses one says which it lacks.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, Field, create_model

from inlay.base.errors import InvalidRequestError
from inlay.extension import FLAG, extensions, known, merged, parts

S = TypeVar("S", bound=BaseModel)


def with_extensions(joined: str) -> Callable[[type[S]], type[S]]:
    """Return a decorator that adds the sections of extensions to a settings class.

    Args:
        joined: key of `Extension.options`: "engine".

    Raises:
        InvalidRequestError: an extension has an option that is there already, or the name of one
            or of a section.
    """

    def extended(settings: type[S]) -> type[S]:
        found = sections_for(joined)
        own = dict.fromkeys(settings.model_fields)
        merged("section of settings", [("inlay", own), ("an extension of that name", found)])
        givers: list[tuple[str, type[BaseModel]]] = [("inlay", settings)]
        givers += [(f"extension {name!r}", section) for name, section in found.items()]
        merged("option", ((who, dict.fromkeys(_options(its))) for who, its in givers))
        fields: dict[str, Any] = {
            name: (section, Field(default_factory=section, title=section.model_config.get("title")))
            for name, section in found.items()
        }
        return create_model(
            settings.__name__,
            __base__=settings,
            __module__=settings.__module__,
            __doc__=settings.__doc__,
            **fields,
        )

    return extended


def sections_for(joined: str) -> Mapping[str, type[BaseModel]]:
    """Return the section of each extension that has one for these settings, by its name."""
    given = parts("options", known())
    return {name: options[joined] for name, options in given if joined in options}


def section_of(settings: BaseModel, section: type[S]) -> S:
    """Return an extension's section of settings that it joins."""
    return next(value for _, value in settings if isinstance(value, section))


def check_loaded(settings: BaseModel) -> None:
    """Raise `InvalidRequestError` for options of an extension that is not loaded."""
    loaded = {extension.name for extension in extensions()}
    for extension in known():
        section = getattr(settings, extension.section or extension.name, None)
        if extension.name in loaded or not isinstance(section, BaseModel):
            continue
        for option in sorted(section.model_dump(exclude_unset=True, exclude_none=True)):
            raise InvalidRequestError(
                f"--{option.replace('_', '-')} is of the extension {extension.name!r}, which is "
                f"not loaded ({FLAG})"
            )


def _options(settings: type[BaseModel]) -> Iterator[str]:
    for name, field in settings.model_fields.items():
        section = field.annotation
        if isinstance(section, type) and issubclass(section, BaseModel):
            yield from _options(section)
        else:
            yield name
