"""What a model's `generation_config.json` says of ending and of sampling."""

import json
from pathlib import Path
from typing import Any

from inlay.errors import InvalidRequestError

_SAMPLING_FIELDS: dict[str, type[int] | type[float]] = {
    "temperature": float,
    "top_p": float,
    "top_k": int,
    "min_p": float,
    "repetition_penalty": float,
}


def generation_config(directory: Path) -> dict[str, Any]:
    """The file of a model directory, empty where there is none.

    Raises `InvalidRequestError` where it is not JSON.
    """
    path = directory / "generation_config.json"
    if not path.is_file():
        return {}
    try:
        generation: dict[str, Any] = json.loads(path.read_bytes())
    except ValueError as error:
        raise InvalidRequestError(f"{path} is not JSON: {error}") from error
    return generation


def eos_token_ids(generation: dict[str, Any], of_config: int | list[int] | None) -> tuple[int, ...]:
    """The model's own end tokens; `of_config` is what its `config.json` names."""
    found = generation.get("eos_token_id", of_config)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def default_sampling(generation: dict[str, Any]) -> dict[str, float | int]:
    """What the generation config says of sampling.

    It counts only where that config samples at all.
    """
    if not generation.get("do_sample", False):
        return {}
    return {
        name: kind(generation[name])
        for name, kind in _SAMPLING_FIELDS.items()
        if generation.get(name) is not None
    }
