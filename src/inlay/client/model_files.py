"""Which files of a model the client needs, and where they are: a directory, or the hub."""

from pathlib import Path

import msgspec
from huggingface_hub import hf_hub_download, snapshot_download

from inlay.errors import InvalidRequestError
from inlay.tensors.hub import asking_hub, local_directory

_SMALL_FILES = ["*.json", "*.jinja", "tokenizer.model"]
_INDEX = "model.safetensors.index.json"
_WHOLE = "model.safetensors"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


def model_directory(model: str | Path, revision: str | None = None) -> Path:
    """The directory with the model's tokenizer, configuration and embedding table.

    A directory is taken as it is. A name on the hub is fetched, or found in the hub's cache: the
    small files and, of a model in several weight files, only those whose tensors are called after
    an embedding.

    Raises:
        InvalidRequestError: neither a directory nor a model the hub gives us.
    """
    local = local_directory(model)
    if local is not None:
        return local
    name = str(model)
    with asking_hub(name):
        directory = Path(snapshot_download(name, revision=revision, allow_patterns=_SMALL_FILES))
        for file in _table_files(directory):
            hf_hub_download(name, file, revision=revision)
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
