"""A model's directory as every library reads it alike.

Libraries differ in what they make of a directory: vLLM and SGLang read every `*.safetensors` in it,
transformers needs an index for parts and refuses a byte order mark. They get one of links, with
the weights of `weight_files` alone, and JSON that is rewritten where it has to be.
"""

import json
from codecs import BOM_UTF8
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory

from inlay.base.errors import InvalidRequestError
from inlay.tensors.checkpoint import checkpoint_of
from inlay.tensors.gguf import is_gguf
from inlay.tensors.stored import tensors_in
from inlay.tensors.weight_files import WHOLE, WeightFiles, find_weights

_INDEX, _CONFIG = f"{WHOLE}.index.json", "config.json"
_TEXTS = (".json", ".jinja", ".txt")


@contextmanager
def tidied(directory: Path, *, every_file: bool = False) -> Iterator[Path]:
    """Yield a directory with the same model: `directory` itself where libraries agree about it.

    Else one of links, which is gone afterwards; for a GGUF file one with its configuration alone.

    Args:
        directory: of a model; nothing in it is changed.
        every_file: the library reads every safetensors file that it finds.

    Raises:
        InvalidRequestError: as `find_weights`, or there is no room for temporary files.
    """
    if is_gguf(directory):
        with _written(directory) as made:
            yield made
        return
    weights = find_weights(directory)
    texts = {
        file.name: data
        for file in directory.iterdir()
        if file.suffix in _TEXTS and (data := _without_mark(file)) is not None
    }
    if not texts and (weights is None or _is_tidy(weights, every_file)):
        yield directory
        return
    with _temporary(directory) as name:
        _fill(Path(name), directory.absolute(), weights, texts)
        yield Path(name)


def _temporary(of: Path) -> TemporaryDirectory[str]:
    try:
        return TemporaryDirectory(prefix="inlay-model-", ignore_cleanup_errors=True)
    except OSError as error:
        raise InvalidRequestError(
            f"{of} cannot be read as it is, and there is no room for a directory in its place: "
            f"set TMPDIR to one that can be written ({error.strerror})"
        ) from error


@contextmanager
def _written(file: Path) -> Iterator[Path]:
    with _temporary(file) as name:
        for text in (_CONFIG, "generation_config.json"):
            (Path(name) / text).write_bytes(checkpoint_of(file).file(text) or b"{}")
        yield Path(name)


def _without_mark(file: Path) -> bytes | None:
    """Return a text without the byte order mark it begins with; None where it has none."""
    if not file.is_file():
        return None
    with file.open("rb") as stream:
        return stream.read() if stream.read(len(BOM_UTF8)) == BOM_UTF8 else None


def _is_tidy(weights: WeightFiles, every_file: bool) -> bool:
    if not weights.plain or not every_file:
        return weights.plain
    names = {file.name for file in weights.directory.glob("*.safetensors")}
    named = WHOLE if not weights.index else _INDEX
    others = {WHOLE, _INDEX} - {named}
    return names == {*weights.names} and not any(
        (weights.directory / other).exists() for other in others
    )


def _fill(
    made: Path, directory: Path, weights: WeightFiles | None, texts: dict[str, bytes]
) -> None:
    names = () if weights is None else weights.names
    for file in directory.iterdir():
        if file.name not in texts and not file.name.endswith((".safetensors", _INDEX)):
            (made / file.name).symlink_to(file)
    for name, data in texts.items():
        (made / name).write_bytes(data)
    if weights is None:
        return
    _drop_named_weights(made / _CONFIG)
    if len(names) == 1 and not weights.index:
        (made / WHOLE).symlink_to(directory / names[0])
        return
    for name in names:
        (made / name).symlink_to(directory / name)
    index = weights.index or {
        tensor.name: file.name for file in weights.paths() for tensor in tensors_in(file)
    }
    written = {"metadata": {}, "weight_map": dict(index)}
    (made / _INDEX).unlink(missing_ok=True)
    (made / _INDEX).write_text(json.dumps(written), encoding="utf-8")


def _drop_named_weights(config: Path) -> None:
    """Have transformers look for the weights as it does where no file names them."""
    try:
        values = json.loads(config.read_bytes())
    except (OSError, ValueError):
        return
    if isinstance(values, dict) and values.pop("transformers_weights", None) is not None:
        config.unlink()
        config.write_text(json.dumps(values), encoding="utf-8")
