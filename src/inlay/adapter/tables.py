"""Embedding tables and heads in an adapter, as PEFT saves them beside a LoRA untrained.

`PeftModel.save_pretrained` adds them where it guesses that they may have changed: the vocabulary
was resized, or the base model could not be looked up. Untrained they equal the model's own.
"""

import logging
import re
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import TypeAlias

import numpy as np

from inlay.base.errors import InvalidRequestError
from inlay.tensors.checkpoint import stored_tensors
from inlay.tensors.stored import StoredTensor
from inlay.tensors.tensor import NUMPY_DTYPES, quoted

log = logging.getLogger(__name__)

DTYPES = {"F64": "float64", "F32": "float32", "F16": "float16", "BF16": "bfloat16"}
"""Dtypes of an adapter's tensors by the names in its file."""

CheckTable: TypeAlias = Callable[[StoredTensor], None]
"""Raises `InvalidRequestError` for a table that is not the model's own."""

_NAME = re.compile(r"base_model\.model\.(?:.*\.)?(embed_tokens|lm_head)(?:\.base_layer)?\.weight")
_ROWS = 4096
_CURE = (
    "if it was not trained, delete it from adapter_model.safetensors (PEFT writes none with "
    "save_pretrained(..., save_embedding_layers=False)); if it was, merge it into the model"
)


def is_table(name: str) -> bool:
    """Return True if a tensor of an adapter is an embedding table or a head as a whole."""
    return _NAME.fullmatch(name) is not None


def refuse(table: StoredTensor, why: str = "is a whole table, not a LoRA's matrix") -> None:
    """Raise `InvalidRequestError`, which says how to do without the table."""
    raise InvalidRequestError(f"the adapter's tensor {quoted(table.name)} {why}: {_CURE}")


def ignore(table: StoredTensor) -> None:
    """Leave out a table that is checked elsewhere."""


def unchanged_from(model: Path) -> CheckTable:
    """Return the check that tables equal those of the model in a directory."""
    return partial(_check, model)


def _check(model: Path, table: StoredTensor) -> None:
    found = _NAME.fullmatch(table.name)
    kind = found[1] if found else ""
    own = _own(model, (kind, "embed_tokens"))  # tied heads are the table
    if own is None or own.dtype not in DTYPES:
        refuse(table, "cannot be compared with this model's, which is not there as plain numbers")
    elif own.shape != table.shape:
        refuse(table, f"has shape {table.shape}, and the model's {own.shape}")
    elif not _equal(own, table):
        refuse(table, "differs from the model's")
    log.info("the adapter's %s equals the model's, and is left out", table.name)


def _own(model: Path, kinds: Iterable[str]) -> StoredTensor | None:
    try:
        stored = list(stored_tensors(model))
    except InvalidRequestError:
        return None
    for kind in kinds:
        ends = (f".{kind}.weight", f"{kind}.weight")
        named = [each for each in stored if each.name == ends[1] or each.name.endswith(ends[0])]
        if named:  # drafts of a model (`mtp.embed_tokens`) have longer names
            return min(named, key=lambda each: (len(each.name), each.name))
    return None


def _equal(own: StoredTensor, table: StoredTensor) -> bool:
    """Compare numbers as they are in the dtype of `table`, some rows at a time."""
    rows, columns = table.shape
    kind = NUMPY_DTYPES[DTYPES[table.dtype]]
    for start in range(0, rows, _ROWS):
        count = (min(rows, start + _ROWS) - start) * columns
        with np.errstate(over="ignore", invalid="ignore"):
            ours = _numbers(own, start * columns, count).astype(kind)
        theirs = _numbers(table, start * columns, count)
        if not np.array_equal(ours, theirs):
            return False
    return True


def _numbers(
    tensor: StoredTensor, start: int, count: int
) -> "np.ndarray[tuple[int], np.dtype[np.generic]]":
    kind = np.dtype(NUMPY_DTYPES[DTYPES[tensor.dtype]])
    offset = tensor.offset + start * kind.itemsize
    return np.fromfile(tensor.file, kind, count, offset=offset)
