"""`inlay embeds convert`: embeddings in another format or data type, read again and compared."""

import sys
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt
import pybase64

from inlay.base.errors import EmbeddingsError, EngineError
from inlay.cli.command import UsageError
from inlay.cli.process import Console
from inlay.client.prompts import container, naming
from inlay.tensors import ReadLimits, read, write
from inlay_tools.files import as_json, check_destination, named, write_bytes
from inlay_tools.files import read as read_file
from inlay_tools.settings import ConvertSettings

Array = npt.NDArray[Any]


def run(settings: ConvertSettings) -> int:
    """Write the file anew; the exit status.

    Raises:
        UsageError: the format does not hold the values, or bytes would go to a terminal.
        FileError: a file cannot be read or written.
        EmbeddingsError: the file holds no embeddings.
    """
    check_destination(settings)
    data = read_file(settings.file)
    with naming(named(settings.file)):
        data = container(data)
        tensor = read(data, limits=ReadLimits(max_bytes=max(len(data), 1)))
    array, changed = _cast(tensor.array, settings.dtype)
    kept = None if settings.format == "npy" else tensor.table_id
    try:
        written = write(array, settings.format, table_id=kept, grid=tensor.grid)
    except EmbeddingsError as error:
        raise UsageError(f"{error.message} (--format, --dtype)") from error
    _check(written, array, kept, tensor.grid)
    if settings.base64:
        written = pybase64.b64encode(written) + b"\n"
    write_bytes(written, settings.output)
    if settings.output is None:
        return 0
    console = Console(sys.stdout, sys.stderr)
    if settings.output_format == "json":
        facts = {"table_id": kept, "rounded": changed}
        said = as_json(settings.output, settings.format, array, len(written), **facts)
        console.out(said)
        return 0
    lost = tensor.table_id is not None and kept is None
    console.line(
        f"{settings.output}: shape {tuple(array.shape)}, {array.dtype}, {settings.format}, "
        f"{len(written)} bytes"
        + (f"; {changed} of {array.size} values rounded" if changed else "")
        + ("; without the table id, which npy cannot hold" if lost else "")
    )
    return 0


def _cast(array: Array, dtype: str) -> tuple[Array, int]:
    """The values in `dtype`, and how many of them changed by that.

    Raises:
        UsageError: a finite value is too large for `dtype`.
    """
    if dtype == "auto":
        return array, 0
    wanted = np.dtype(ml_dtypes.bfloat16 if dtype == "bfloat16" else dtype)
    with np.errstate(over="ignore"):
        cast = array.astype(wanted)
    before, after = array.astype(np.float64), cast.astype(np.float64)
    beyond = int((np.isfinite(before) & ~np.isfinite(after)).sum())
    if beyond:
        raise UsageError(f"--dtype {dtype} has no room for {beyond} of the values: too large")
    same = (before == after) | (np.isnan(before) & np.isnan(after))
    return cast, int((~same).sum())


def _check(
    data: bytes, array: Array, table_id: str | None, grid: tuple[int, int, int] | None
) -> None:
    again = read(data, limits=ReadLimits(max_bytes=len(data)))
    same = again.shape == array.shape and again.data.view == memoryview(array.tobytes())
    told = (again.dtype, again.table_id, again.grid)
    if not same or told != (str(array.dtype), table_id, grid):
        raise EngineError("what was written does not read back as what was meant: nothing is kept")
