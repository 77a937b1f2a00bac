"""Facts read from a model directory: dtype, end tokens, sampling defaults, embedding table."""

from collections.abc import Collection, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from msgspec.structs import replace

from inlay.base.errors import InvalidRequestError
from inlay.engine.sections import LimitOptions, MediaOptions, ModelOptions
from inlay.engine.weights import weights_id
from inlay.media.families import spec_of
from inlay.media.spec import MediaSpec
from inlay.messages.fields import MODEL_DEFAULTS
from inlay.tensors.checkpoint import config_of, json_of
from inlay.tensors.table import EmbeddingTable

_HALF_BOUND = 1024.0
"""Largest absolute value of an embedding vector for a float16 model.

Its residual stream adds up to 64 values of that size without overflow.
"""

_TIMES_TABLE = 100
_GENERATION = "generation_config.json"


def dtype_name(options: ModelOptions, directory: Path) -> str:
    """Return the requested dtype; for "auto", the checkpoint's own.

    vLLM's and SGLang's "auto" would turn float32 into half precision. Returns "auto" if the
    checkpoint names no single dtype.
    """
    if options.dtype != "auto":
        return options.dtype
    config = config_of(directory)
    text = config.get("text_config") or config
    if config.get("quantization_config"):
        return "auto"
    stored = str(text.get("dtype") or text.get("torch_dtype") or "float32")
    return stored if stored in ("float32", "bfloat16", "float16") else "auto"


def generation_config(options: ModelOptions, directory: Path) -> dict[str, Any]:
    """Read the file of a model directory, or of that which settings name; empty if there is none.

    Sampling is off in it where settings ask for the API's own defaults.

    Raises:
        InvalidRequestError: it is not JSON, or a directory that settings name has none.
    """
    named = options.generation_config
    other = named not in ("auto", "none", "vllm")
    source = Path(named).expanduser() if other else directory
    generation: dict[str, Any] | None = json_of(source, _GENERATION)
    if generation is None:
        if other:
            raise InvalidRequestError(
                f"--generation-config {named}: there is no {source / _GENERATION}; allowed: auto, "
                "vllm, none, or a directory with that file",
                param="generation_config",
            )
        return {}
    return generation | {"do_sample": False} if named in ("none", "vllm") else generation


def eos_token_ids(generation: dict[str, Any], of_config: int | list[int] | None) -> tuple[int, ...]:
    """Return the model's end tokens; `of_config` are those named by its `config.json`."""
    found = generation.get("eos_token_id", of_config)
    if found is None:
        return ()
    return (found,) if isinstance(found, int) else tuple(found)


def default_sampling(
    generation: dict[str, Any], lacked: Collection[str] = ()
) -> dict[str, float | int]:
    """Return the sampling defaults of the generation config, without those that an engine lacks.

    Empty unless that config enables sampling.
    """
    if not generation.get("do_sample", False):
        return {}
    return {
        name: kind(generation[name])
        for name, kind in MODEL_DEFAULTS.items()
        if generation.get(name) is not None and name not in lacked
    }


@dataclass(frozen=True, slots=True)
class TableFacts:
    """Properties of one model's embedding vectors.

    Attributes:
        refused: why they are refused, or None.
        table_id: identity of the embedding table, "" if it cannot be read.
        abs_max: the table's largest absolute value.
        bound: largest allowed absolute value, or None for any.
    """

    refused: str | None
    table_id: str
    abs_max: float
    bound: float | None


def row_facts(
    options: LimitOptions, directory: Path, dtype: str, refused: str | None
) -> TableFacts:
    """Return the properties of the model in `directory`.

    Args:
        options: may set the bound.
        directory: directory with the embedding table.
        dtype: dtype of activations, by torch's name.
        refused: why the engine refuses embedding vectors for this model, or None.
    """
    table_id, abs_max = "", 0.0
    try:
        table = EmbeddingTable.open(directory)
        table_id, abs_max = table.id, table.abs_max()
    except InvalidRequestError as error:
        refused = refused or f"its embedding table cannot be read: {error.message}"
    bound = options.max_prompt_embeds_abs
    if bound is None:
        bound = abs_max * _TIMES_TABLE
        bound = min(bound, _HALF_BOUND) if dtype == "float16" else bound
    return TableFacts(refused, table_id, abs_max, bound or None)


def image_layout(
    options: MediaOptions, directory: Path, packages: Sequence[str]
) -> MediaSpec | None:
    """Return the layout of a model's images, as engines with a tower of their own take them.

    None if it has none. Its videos and sounds are left out.

    Args:
        options: may change its processor and set numbers of items.
        directory: of the model.
        packages: that decide the pixels that the tower sees.

    Raises:
        InvalidRequestError: the files lack what the layout needs.
    """
    spec = spec_of(
        directory,
        weights_id=weights_id(directory),
        backend=" ".join(_versions(packages)),
        max_items=options.max_media_items,
        processor_kwargs=options.processor_kwargs,
    )
    if spec is None or spec.image is None:
        return None
    placeholders = {"image": spec.placeholders["image"]}
    return replace(
        spec,
        embeds=options.enable_mm_embeds,
        placeholders=placeholders,
        video=None,
        audio=None,
    )


def _versions(packages: Sequence[str]) -> Iterator[str]:
    for name in packages:
        with suppress(PackageNotFoundError):
            yield f"{name} {version(name)}"
