"""End tokens and sampling defaults from a model's `generation_config.json`."""

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
    """Read the file of a model directory; empty if there is none.

    Raises `InvalidRequestError` if it is not JSON.
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
    """Return the model's end tokens; `of_config` are those named by its `config.json`."""
    found = generation.get("eos_token_id", of_config)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def default_sampling(generation: dict[str, Any]) -> dict[str, float | int]:
    """Return the sampling defaults of the generation config.

    Empty unless that config enables sampling.
    """
    if not generation.get("do_sample", False):
        return {}
    return {
        name: kind(generation[name])
        for name, kind in _SAMPLING_FIELDS.items()
        if generation.get(name) is not None
    }
