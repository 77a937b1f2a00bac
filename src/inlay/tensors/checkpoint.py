"""A model's files, whatever their form: a directory, or one GGUF file.

A model is named by the path of either everywhere; this is where the two differ.
"""

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from inlay.base.errors import InvalidRequestError
from inlay.tensors.gguf import is_gguf
from inlay.tensors.gguf_model import GgufModel
from inlay.tensors.stored import StoredTensor, tensors_in
from inlay.tensors.weight_files import weight_files

_OMNI, _THINKER = "qwen2_5_omni", "Qwen2_5OmniThinkerForConditionalGeneration"
_PAGES, _SEEING = "colqwen2", "qwen2_vl"


class Checkpoint(Protocol):
    """A model in any form: small files, by their names in a directory, and tensors."""

    def file(self, name: str) -> bytes | None:
        """The bytes of a small file; None where there is none.

        Raises:
            InvalidRequestError: it cannot be read, or made.
        """

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[StoredTensor]:
        """All tensors of the model; arguments and errors as `stored_tensors`."""


@dataclass(frozen=True, slots=True)
class ModelDirectory:
    """A directory with config.json and weights in safetensors."""

    path: Path

    def file(self, name: str) -> bytes | None:
        try:
            return (self.path / name).read_bytes()
        except (FileNotFoundError, NotADirectoryError):
            return None
        except OSError as error:
            raise InvalidRequestError(
                f"cannot read {self.path / name}: {error.strerror}", param="model"
            ) from error

    def tensors(self, wanted: Callable[[str], bool]) -> Iterator[StoredTensor]:
        seen: dict[str, Path] = {}
        for file in weight_files(self.path).paths(wanted):
            for tensor in tensors_in(file):
                if seen.setdefault(tensor.name, file) is not file:
                    raise InvalidRequestError(
                        f"{self.path} has tensor {tensor.name} twice: in "
                        f"{seen[tensor.name].name} and in {file.name}"
                    )
                yield tensor


def checkpoint_of(path: Path) -> Checkpoint:
    """The model at a path.

    Raises:
        InvalidRequestError: a GGUF file that cannot be read, or is of a model that is not known.
    """
    return GgufModel.open(path) if is_gguf(path) else ModelDirectory(path)


def json_of(path: Path, name: str) -> Any:
    """The value in a JSON file of a model; None where there is none.

    Raises:
        InvalidRequestError: it cannot be read, or is not JSON.
    """
    data = checkpoint_of(path).file(name)
    try:
        return None if data is None else json.loads(data)
    except (ValueError, RecursionError) as error:
        raise InvalidRequestError(f"cannot read {path / name}: {error}", param="model") from error


def config_of(path: Path) -> dict[str, Any]:
    """The model's `config.json`, as `model_config` takes it.

    Raises:
        InvalidRequestError: as `whole_config_of` and `model_config`.
    """
    return model_config(whole_config_of(path))


def whole_config_of(path: Path) -> dict[str, Any]:
    """The object in a model's `config.json`, also of one around the model that is served.

    Raises:
        InvalidRequestError: there is none, or it is not a JSON object.
    """
    config = json_of(path, "config.json")
    if config is None:
        raise InvalidRequestError(
            f"{path} has no config.json: not a model directory", param="model"
        )
    if not isinstance(config, dict):
        raise InvalidRequestError(
            f"{path / 'config.json'} holds {type(config).__name__}, not an object"
        )
    return config


def model_config(config: dict[str, Any]) -> dict[str, Any]:
    """The configuration of the model inside another; any other is returned as it is.

    Of Qwen2.5-Omni its thinker's (one that was saved alone is of the same type), of ColQwen2 that
    of its vision-language model, under the type and architectures of the whole.

    Raises:
        InvalidRequestError: ColQwen2 around another model than Qwen2-VL.
    """
    family = config.get("model_type")
    if family == _PAGES:
        inside = config.get("vlm_config")
        inside = inside if isinstance(inside, dict) else {}
        if inside.get("model_type") != _SEEING:
            raise InvalidRequestError(
                f"a {_PAGES!r} model around {str(inside.get('model_type'))[:80]!r} is not served; "
                f"served: {_SEEING!r}",
                param="model",
            )
        return {**inside, **config}
    kind = {"model_type": _OMNI, "architectures": [_THINKER]}
    thinker = config.get("thinker_config")
    if family == _OMNI and isinstance(thinker, dict):
        own = {key: config[key] for key in ("dtype", "torch_dtype") if key in config}
        return {**own, **thinker, **kind}
    return {**config, **kind} if family == f"{_OMNI}_thinker" else config


def stored_tensors(
    path: Path, wanted: Callable[[str], bool] = lambda name: True
) -> Iterator[StoredTensor]:
    """All tensors of a model's weights, in order of files and headers.

    Args:
        path: of the model.
        wanted: which names matter: files that hold none of them, as the index says, may be missing.

    Raises:
        InvalidRequestError: no such file, a header that does not fit its file, or a tensor in two
            files; says which, and what is wrong.
    """
    return checkpoint_of(path).tensors(wanted)


def check_tensors(path: Path) -> None:
    """Read the headers of a model's weight files, and nothing else.

    Raises `InvalidRequestError` as `stored_tensors`.
    """
    for _ in stored_tensors(path):
        pass
