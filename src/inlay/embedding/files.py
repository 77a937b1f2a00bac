"""JSON files of a model directory, and the names in them."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

from inlay.base.errors import InvalidRequestError

T = TypeVar("T")

ACTIVATIONS = {
    "torch.nn.modules.linear.Identity": "identity",
    "torch.nn.modules.activation.Tanh": "tanh",
    "torch.nn.modules.activation.ReLU": "relu",
    "torch.nn.modules.activation.GELU": "gelu",
    "torch.nn.modules.activation.SiLU": "silu",
    "torch.nn.modules.activation.Sigmoid": "sigmoid",
}
"""Supported activations of a Dense layer or a pair's score, by torch class name."""


def json_of(path: Path, default: Any) -> Any:
    """Return what a file holds, or `default` if there is none.

    Raises `InvalidRequestError` if it cannot be read.
    """
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, NotADirectoryError):
        return default
    except (OSError, ValueError) as error:
        raise InvalidRequestError(f"cannot read {path}: {error}") from error


def object_of(path: Path) -> dict[str, Any]:
    """Return the object in a file, empty if there is no file. Raises as `json_of`."""
    found = json_of(path, {})
    if not isinstance(found, dict):
        raise InvalidRequestError(f"{path} must hold an object")
    return found


_KINDS: dict[type, str] = {dict: "an object", str: "a string", float: "a number"}


def field_of(path: Path, said: Mapping[str, Any], name: str, kind: type[T]) -> T | None:
    """Return a field of a file's object; None where it is absent or empty.

    Raises `InvalidRequestError`, which names both, if it is of another type.
    """
    found: T | None = said.get(name)
    if found and not isinstance(found, (int, float) if kind is float else kind):
        raise InvalidRequestError(f"{path}: {name} must be {_KINDS[kind]}, got {found!r:.80}")
    return found or None


def activation_of(name: object, directory: Path) -> str:
    """Look up an activation by its torch class name in a file of `directory`.

    Raises `InvalidRequestError` if it is not supported.
    """
    found = ACTIVATIONS.get(name) if isinstance(name, str) else None
    if found is None:
        raise InvalidRequestError(
            f"{directory} ends with {name}, which is not served; served: {', '.join(ACTIVATIONS)}"
        )
    return found
