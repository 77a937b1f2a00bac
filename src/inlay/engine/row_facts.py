"""Metadata about embedding vectors as prompts, for vLLM and SGLang."""

from dataclasses import dataclass
from pathlib import Path

from inlay.engine.settings import EngineSettings
from inlay.errors import InvalidRequestError
from inlay.tensors.table import EmbeddingTable

_HALF_BOUND = 1024.0
"""Largest absolute value of an embedding vector for a float16 model.

Its residual stream adds up to 64 values of that size without overflow.
"""

_TIMES_TABLE = 100


@dataclass(frozen=True, slots=True)
class RowFacts:
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
    settings: EngineSettings, directory: Path, dtype: str, refused: str | None
) -> RowFacts:
    """Return the properties of the model in `directory`.

    Args:
        settings: may set the bound.
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
    bound = settings.max_prompt_embeds_abs
    if bound is None:
        bound = abs_max * _TIMES_TABLE
        bound = min(bound, _HALF_BOUND) if dtype == "float16" else bound
    return RowFacts(refused, table_id, abs_max, bound or None)


__all__ = ["RowFacts", "row_facts"]
