"""Engines by the settings that name them: what they refuse, and need around their process."""

from collections.abc import Mapping, Sequence

from inlay.base.errors import InvalidRequestError
from inlay.engine.extension_options import sections_for
from inlay.engine.settings import EngineSettings
from inlay.engine.spec import OPTIONS, EngineSpec, engines, imported, known
from inlay.extension import FLAG


def spec_of(settings: EngineSettings) -> EngineSpec:
    """Return the engine that settings name.

    Raises:
        InvalidRequestError: it is of an extension that is not loaded.
    """
    found = engines().get(settings.model.engine)
    if found is None:
        raise InvalidRequestError(
            f"--engine {settings.model.engine} is of an extension that is not loaded ({FLAG}); "
            f"there are: {', '.join(engines())}",
            param="engine",
        )
    return found


def environment(
    settings: EngineSettings, inherited: Mapping[str, str], host: str = "localhost"
) -> dict[str, str]:
    """Return the environment variables to add to those the engine's process inherits.

    `host` is a name of this machine by which other workers reach it.
    """
    # The library may be in another Python only.
    path = spec_of(settings).environment
    return dict(imported(path)(settings, inherited, host)) if path else {}


def check_options(settings: EngineSettings) -> None:
    """Refuse settings that the engine does not take, or that contradict each other.

    Raises:
        InvalidRequestError: as said.
    """
    spec = spec_of(settings)
    exchanges = settings.kv.role != "both" and settings.model.engine != "sglang"
    if exchanges and not settings.cache.enable_prefix_caching:
        raise InvalidRequestError(
            f"--role {settings.kv.role} needs prefix caching: what other workers fetch is what it "
            "has cached",
            param="role",
        )
    words = settings.pooling.score_tokens
    # What auto stands for is not known before the files are read.
    if words and settings.model.task not in ("score", "auto") and "score_tokens" in spec.options:
        raise InvalidRequestError(
            f"--score-tokens {','.join(words)} with --task {settings.model.task}: allowed with "
            "--task score",
            param="score_tokens",
        )
    if spec.check:
        imported(spec.check)(settings)
    for option in sorted((OPTIONS | _of_extensions()) - spec.options):
        if not _is_set(settings, option):
            continue
        takers = [name for name, other in engines().items() if option in other.options]
        raise InvalidRequestError(
            f"--{option.replace('_', '-')} is for {_named(takers)}, not for {settings.model.engine}"
            f"{spec.hints.get(option, '')}",
            param=option.partition(" ")[0],
        )


def _of_extensions() -> frozenset[str]:
    """Return options that no engine takes but those that name them."""
    names = (each for one in sections_for("engine").values() for each in one.model_fields)
    return frozenset(names) | {f"task {spec.task}" for spec in known().values() if spec.task}


def _named(takers: Sequence[str]) -> str:
    if not takers:
        return "engines of an extension that is not loaded"
    return f"the {' and '.join(takers)} engine{'s' if len(takers) > 1 else ''}"


def _is_set(settings: EngineSettings, option: str) -> bool:
    name, _, task = option.partition(" ")
    value = settings.value(name)
    default = EngineSettings.default(name)
    return value == task if task else value is not False and value not in (default, None, "")
