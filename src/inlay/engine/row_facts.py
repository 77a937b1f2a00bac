"""What a card says of rows as prompts, for engines that are others'."""

from dataclasses import dataclass
from pathlib import Path

from inlay.engine.settings import EngineSettings
from inlay.errors import InvalidRequestError
from inlay.tensors.table import EmbeddingTable

_HALF_BOUND = 1024.0
"""Largest absolute value of a row for a float16 model.

Its residual stream adds up to 64 of that size before it overflows.
"""

_TIMES_TABLE = 100


@dataclass(frozen=True, slots=True)
class RowFacts:
    """Rows of one model.

    Attributes:
        refused: why there may be none, or None.
        table_id: of the embedding table, "" where it cannot be read.
        abs_max: the table's largest absolute value.
        bound: a row's, or None for any.
    """

    refused: str | None
    table_id: str
    abs_max: float
    bound: float | None


def row_facts(
    settings: EngineSettings, directory: Path, dtype: str, refused: str | None
) -> RowFacts:
    """The facts of the model in `directory`.

    Args:
        settings: they may bound rows.
        directory: with the embedding table.
        dtype: of activations, by torch's name.
        refused: why the engine takes no rows of this model, or None.
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
