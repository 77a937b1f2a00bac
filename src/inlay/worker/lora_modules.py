"""Adapters that `--lora-modules` and `--adapters-file` name."""

from collections.abc import Iterable
from pathlib import Path

import msgspec

from inlay.adapter import LoraFiles, open_adapter
from inlay.adapter.address import AllowedSources, parse
from inlay.adapter.files import check_fits, shapes_of
from inlay.adapter.tables import ignore, unchanged_from
from inlay.base.errors import InvalidRequestError, NotFoundError, why_unusable
from inlay.engine.settings import EngineSettings
from inlay.messages.commands import LoadAdapter


class _NamedAdapter(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    path: str
    base_model_name: str | None = None
    sha256: str | None = None


def parse_modules(modules: Iterable[str]) -> list[LoadAdapter]:
    """The orders that `--lora-modules` gives: `name=path`, or an object as JSON.

    Raises:
        InvalidRequestError: one is neither.
    """
    return [_parsed(module) for module in modules]


def read_modules(path: Path) -> list[LoadAdapter]:
    """The orders of a file: a list of objects with name, path and perhaps sha256, YAML or JSON.

    An adapter of the same name is replaced.

    Raises:
        InvalidRequestError: the file cannot be read, is not such a list, or has a name twice.
    """
    # Imported late: a worker needs it for such a file only.
    import yaml

    try:
        said = msgspec.convert(yaml.safe_load(path.read_text("utf-8")) or [], list[_NamedAdapter])
    except (OSError, UnicodeDecodeError, yaml.YAMLError, msgspec.ValidationError) as error:
        raise InvalidRequestError(
            f"{path}: a list of name, path and sha256 is wanted: {why_unusable(error)}",
            param="adapters_file",
        ) from error
    names = [module.name for module in said]
    twice = {name for name in names if names.count(name) > 1}
    if twice:
        raise InvalidRequestError(
            f"{path}: {', '.join(sorted(twice))} is named twice", param="adapters_file"
        )
    return [
        LoadAdapter(
            module.name,
            module.path,
            module.sha256,
            in_place=True,
            base_model=module.base_model_name,
            recorded=True,
        )
        for module in said
    ]


def check_adapters(settings: EngineSettings) -> None:
    """Say now, before a model is loaded for it, what of adapters in `settings` cannot be.

    Raises:
        InvalidRequestError: a module or an allowed source that is none, more modules than have
            room, or an adapter on this machine that the model cannot take, as far as the headers of
            its files say.
    """
    orders = parse_modules(settings.adapters.lora_modules)
    allowed = AllowedSources(settings.adapters.allowed_lora_sources)
    if len(orders) > settings.cpu_loras:
        raise InvalidRequestError(
            f"{len(orders)} adapters are named in --lora-modules, and there is room for "
            f"{settings.cpu_loras} (--max-cpu-loras)",
            param="lora_modules",
        )
    for order in orders:
        try:
            _check_files(order, settings, allowed)
        except (InvalidRequestError, NotFoundError) as error:
            raise InvalidRequestError(
                f"adapter {order.name!r} ({order.path}): {error.message}", param="lora_modules"
            ) from error


def _check_files(order: LoadAdapter, settings: EngineSettings, allowed: AllowedSources) -> None:
    where = parse(order.path)
    directory = Path(where.path)
    if where.scheme != "file" or not (
        directory.exists() or order.path.startswith(("/", ".", "~", "file:"))
    ):
        return
    allowed.check(where)
    model = Path(settings.model.model).expanduser()
    files = open_adapter(
        directory,
        max_bytes=settings.adapters.max_lora_bytes,
        check_table=unchanged_from(model) if model.exists() else ignore,
    )
    if not isinstance(files, LoraFiles):
        return
    elsewhere = "--enable-lora" in settings.library.engine_arguments
    if not settings.adapters.enable_lora and not elsewhere:
        raise InvalidRequestError("LoRA adapters are off; --enable-lora makes room for them")
    if files.rank > settings.adapters.max_lora_rank and not elsewhere:
        raise InvalidRequestError(
            f"it has rank {files.rank}; allowed: at most {settings.adapters.max_lora_rank} "
            "(--max-lora-rank)"
        )
    if model.exists():
        check_fits(files, shapes_of(model))


def _parsed(module: str) -> LoadAdapter:
    if module.lstrip().startswith("{"):
        try:
            said = msgspec.json.decode(module, type=_NamedAdapter)
        except msgspec.DecodeError as error:
            raise InvalidRequestError(
                "a LoRA module as JSON has name and path, and may have base_model_name and "
                f"sha256: {error}; got {module[:80]!r}",
                param="lora_modules",
            ) from error
        return LoadAdapter(said.name, said.path, said.sha256, base_model=said.base_model_name)
    name, equals, path = module.partition("=")
    if not name or not equals or not path:
        raise InvalidRequestError(
            f"a LoRA module is name=path, got {module[:80]!r}", param="lora_modules"
        )
    return LoadAdapter(name, path)
