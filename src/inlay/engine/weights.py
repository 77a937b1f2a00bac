"""Location and identity of a model's files."""

import atexit
import json
import os
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path

from blake3 import blake3

from inlay.tensors.checkpoint import config_of, stored_tensors
from inlay.tensors.gguf_model import types_in
from inlay.tensors.hub import asking_hub, gguf_on_hub, local_directory
from inlay.tensors.table import spread
from inlay.tensors.tidy_directory import tidied
from inlay.tensors.weight_files import BGE_M3_HEADS

_FILES = [
    "*.safetensors", "*.json", "*.jinja", "*.model", "*.txt",
    # Of embedding models: modules and heads by `torch.save`, and ColBERT's configuration.
    "*/pytorch_model.bin", *BGE_M3_HEADS, "artifact.metadata",
]  # fmt: skip

_VOLATILE = frozenset(
    {"_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache"}
)
"""Configuration fields that may change without changing the model.

Digests contain the dtype separately.
"""

_BLOCK = 4096
_BLOCKS = 4


def directory_of(model: str, revision: str | None, files: Sequence[str] = _FILES) -> Path:
    """Return the local directory of a model, or its GGUF file.

    What is here is returned as it is; a hub name gives its snapshot (cache only under
    `HF_HUB_OFFLINE`).

    Only `files` (names or patterns) of a snapshot are fetched; of `owner/model:Q4_K_M` that GGUF
    file.

    Raises:
        InvalidRequestError: neither a directory nor an available hub model.
    """
    local = local_directory(model)
    if local is not None:
        # Parts of a file are found by its name, which a link to the hub's cache leads away from.
        return local.resolve() if local.is_dir() else local.absolute()
    if (file := gguf_on_hub(model, revision)) is not None:
        return file
    # Imported late: of most models that are served nothing is fetched.
    from huggingface_hub import snapshot_download

    with asking_hub(model):
        return Path(snapshot_download(model, revision=revision, allow_patterns=list(files)))


def for_other_engines(directory: Path) -> Path:
    """Return a directory with the same model for a library that reads all files of weights.

    `directory` itself where it holds nothing else; one of links otherwise, which is there until
    this process ends. Raises `InvalidRequestError` as `tidied`.
    """
    until_the_end = ExitStack()
    atexit.register(until_the_end.close)
    return until_the_end.enter_context(tidied(directory, every_file=True))


def weights_form(path: Path, dtype: str, activations: str = "") -> str:
    """Return the form of the weights in files, and what is made of them; "" for plain tensors.

    Args:
        path: of the model.
        dtype: that it is computed in.
        activations: what these are rounded to in products with the blocks, if with these.
    """
    types = types_in(path)
    made = f"activations {activations}" if activations else f"dequantised to {dtype}"
    if not types:
        return made if activations else ""
    return f"GGUF ({', '.join(types)}), {made}"


def weights_id(directory: Path, activations: str = "") -> str:
    """Return 32 hex digits: BLAKE3 of the configuration and of samples of every tensor.

    Of a tensor: name, dtype, shape and sampled blocks. Its file does not count; what `activations`
    are rounded to does, for it changes every number.
    """
    config = {key: value for key, value in config_of(directory).items() if key not in _VOLATILE}
    hasher = blake3(json.dumps(config, sort_keys=True, separators=(",", ":")).encode())
    for tensor in sorted(stored_tensors(directory), key=lambda tensor: tensor.name):
        hasher.update(f"\n{tensor.name}:{tensor.dtype}:{tensor.shape}:{tensor.nbytes}\n".encode())
        with tensor.file.open("rb") as stream:
            for block in spread(-(-tensor.nbytes // _BLOCK), _BLOCKS):
                start = block * _BLOCK
                hasher.update(
                    os.pread(
                        stream.fileno(), min(_BLOCK, tensor.nbytes - start), tensor.offset + start
                    )
                )
    if activations:
        hasher.update(f"\nactivations:{activations}\n".encode())
    return hasher.digest(16).hex()
