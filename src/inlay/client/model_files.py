"""Which files of a model the client needs, and where they are: a directory, or the hub."""

from pathlib import Path

import msgspec
from huggingface_hub import hf_hub_download, snapshot_download
from huggingface_hub.errors import HfHubHTTPError, HFValidationError, LocalEntryNotFoundError

from inlay.errors import InvalidRequestError

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def model_directory(model: str | Path, revision: str | None = None) -> Path:
    """The directory with the model's tokenizer, configuration and embedding table.

    A directory is taken as it is. A name on the hub is fetched, or found in the hub's cache: the small files and, of a
    model in several weight files, only those whose tensors are called after an embedding.

    Raises:
        InvalidRequestError: neither a directory nor a model the hub gives us.
    """
    path = Path(model)
    if path.is_dir():
        return path
    name = str(model)
    if path.is_absolute() or name.startswith((".", "~")) or name.count("/") != 1:
        raise InvalidRequestError(f"{name!r} is not a directory, nor a name on the hub (owner/model)")
    try:
        directory = Path(snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES))
        for file in _table_files(directory):
            hf_hub_download(name, file, revision=revision)
    except (HfHubHTTPError, HFValidationError, LocalEntryNotFoundError, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise InvalidRequestError(
            f"model {name!r}: not a directory here, and the hub says: {reason}"
        ) from error
    return directory


def _table_files(directory: Path) -> list[str]:
    index = directory / _INDEX
    if not index.is_file():
        return [_WHOLE]
    try:
        weights = msgspec.json.decode(index.read_bytes(), type=_Index).weight_map
    except msgspec.MsgspecError as error:
        raise InvalidRequestError(f"{index}: not a safetensors index: {error}") from error
    return sorted({file for name, file in weights.items() if "emb" in name or "wte" in name})
