"""Transforms of the user's: a function, a command, or rows that were already made.

Files of rows of many prompts, one after another, are safetensors: `rows` is (N, h), `offsets`
(prompts + 1): prompt i has the rows from offsets[i] to offsets[i + 1].
"""

import importlib
import json
import re
import shlex
import subprocess
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import numpy.typing as npt

from inlay.base.errors import InvalidRequestError
from inlay.tensors.stored import StoredTensor, tensors_in
from inlay_audit.prompts import AuditPrompt, Floats, Rng
from inlay_audit.transform import WORDS, RowTransform, Setting, Transform, named

_ROWS: Mapping[str, npt.DTypeLike] = {
    "F64": np.float64,
    "F32": np.float32,
    "F16": np.float16,
    "BF16": ml_dtypes.bfloat16,
}
_OFFSETS: Mapping[str, npt.DTypeLike] = {"I64": np.int64, "I32": np.int32}


def pack(rows: Sequence[Floats], ids: Sequence[npt.NDArray[np.int64]], seed: int) -> bytes:
    """A file of rows (n, h) with the token of each (`token_ids`), and a `seed` in its metadata."""
    offsets = np.cumsum([0, *map(len, rows)], dtype=np.int64)
    tensors: dict[str, tuple[str, npt.NDArray[Any]]] = {
        "rows": ("F32", np.concatenate(rows)),
        "offsets": ("I64", offsets),
        "token_ids": ("I64", np.concatenate(ids)),
    }
    header: dict[str, Any] = {"__metadata__": {"seed": str(seed)}}
    end = 0
    for name, (dtype, array) in tensors.items():
        header[name] = {
            "dtype": dtype,
            "shape": array.shape,
            "data_offsets": (end, end + array.nbytes),
        }
        end += array.nbytes
    text = json.dumps(header).encode()
    text = text.ljust(len(text) + -len(text) % 8)
    data = (array.tobytes() for _, array in tensors.values())
    return b"".join((len(text).to_bytes(8, "little"), text, *data))


def unpack(file: Path, name: str) -> list[Floats]:
    """The rows of each prompt, float32.

    Raises:
        InvalidRequestError: not such a file.
    """
    stored = {tensor.name: tensor for tensor in tensors_in(file)}
    if not {"rows", "offsets"} <= set(stored):
        raise InvalidRequestError(
            f"{name} holds {', '.join(sorted(stored)) or 'nothing'}; it must hold `rows`, those of "
            "all texts one after another, and `offsets`, where each begins and the last ends"
        )
    rows = _read(stored["rows"], _ROWS, 2, name)
    offsets = _read(stored["offsets"], _OFFSETS, 1, name).tolist()
    if len(offsets) < 2 or offsets[0] != 0 or offsets[-1] != len(rows):
        raise InvalidRequestError(f"{name}: offsets must go from 0 to the {len(rows)} of its rows")
    if any(stop < start for start, stop in pairwise(offsets)):
        raise InvalidRequestError(f"{name}: offsets must not fall")
    wide = rows.astype(np.float32)
    return [wide[start:stop] for start, stop in pairwise(offsets)]


def _read(
    tensor: StoredTensor, dtypes: Mapping[str, npt.DTypeLike], dimensions: int, name: str
) -> npt.NDArray[Any]:
    dtype = np.dtype(dtypes[tensor.dtype]) if tensor.dtype in dtypes else None
    count = int(np.prod(tensor.shape, dtype=object))
    if dtype is None or len(tensor.shape) != dimensions or count * dtype.itemsize != tensor.nbytes:
        raise InvalidRequestError(
            f"{name}: {tensor.name} is {tensor.dtype} of shape {tensor.shape} in {tensor.nbytes} "
            f"bytes; it must be {' or '.join(dtypes)} with {dimensions} dimensions"
        )
    with tensor.file.open("rb") as stream:
        stream.seek(tensor.offset)
        return np.frombuffer(stream.read(tensor.nbytes), dtype).reshape(tensor.shape)


_FUNCTION = re.compile(r"([A-Za-z_][\w.]*):([A-Za-z_]\w*)")

UserFunction = Callable[[Floats, npt.NDArray[np.int64], Rng], Floats]
"""Rows to send, (m, k), of (n, h) float32 rows of the table and their (n,) token ids; the generator
is for randomness that is new each time."""


def transform_of(spec: str, setting: Setting) -> Transform:
    """The transform of a name, or of MODULE:FUNCTION, which is imported.

    Modules are found where Python finds them, and in the working directory.

    Raises:
        InvalidRequestError: no such transform.
    """
    match = _FUNCTION.fullmatch(spec)
    if match is None or match[1] in WORDS:
        return named(spec, setting)
    return _function(spec, *match.groups())


@dataclass(frozen=True)
class CommandTransform:
    """A command that reads a file of `packed` on standard input and writes one on its output.

    It is run once for all texts that are sent at a time, and not by a shell.

    Attributes:
        name: the command as it was given.
    """

    name: str
    can_resend: bool = True

    def send(
        self, prompts: Sequence[AuditPrompt], rows: Sequence[Floats], rng: Rng
    ) -> list[Floats]:
        """Rows that the command wrote. Raises `InvalidRequestError` where it fails."""
        what = f"--transform-command {self.name}"
        try:
            words = shlex.split(self.name)
        except ValueError as error:
            raise InvalidRequestError(f"{what}: {error}") from error
        if not words:
            raise InvalidRequestError("--transform-command is empty")
        with tempfile.TemporaryDirectory() as directory:
            given, made = Path(directory) / "in.safetensors", Path(directory) / "out.safetensors"
            given.write_bytes(
                pack(rows, [each.ids for each in prompts], int(rng.integers(1 << 31)))
            )
            try:
                with given.open("rb") as stdin, made.open("wb") as stdout:
                    done = subprocess.run(
                        words, stdin=stdin, stdout=stdout, stderr=subprocess.PIPE, check=False
                    )
            except OSError as error:
                raise InvalidRequestError(f"{what}: {error.strerror}: {words[0]}") from error
            if done.returncode:
                said = done.stderr.decode("utf-8", "replace").strip().splitlines() or ["nothing"]
                raise InvalidRequestError(
                    f"{what}: ended with status {done.returncode} and said: {said[-1][:500]}"
                )
            return unpack(made, f"{what}: standard output")

    def served(self, rows: Floats) -> Floats:
        return rows


@dataclass(frozen=True, eq=False)
class GivenRows:
    """Rows that were made elsewhere, of all texts of a file."""

    name: str
    rows: Sequence[Floats]
    can_resend: bool = False

    @classmethod
    def of(cls, file: Path, texts: int, width: int) -> "GivenRows":
        """Read a file of `packed`.

        Raises:
            InvalidRequestError: no such file, of another number of texts or another width.
        """
        rows = unpack(file, f"--rows {file}")
        if len(rows) != texts:
            raise InvalidRequestError(
                f"--rows {file} has rows of {len(rows)} texts, and --texts has {texts}: one for "
                "each is needed, in the same order"
            )
        if rows[0].shape[1] != width:
            raise InvalidRequestError(
                f"--rows {file} has rows of {rows[0].shape[1]} elements, and the model's have "
                f"{width}: were they made for another model? Name that one with --model. A "
                "transform that changes the width can be given with --transform-command"
            )
        return cls(file.name, rows)

    def send(
        self, prompts: Sequence[AuditPrompt], rows: Sequence[Floats], rng: Rng
    ) -> list[Floats]:
        """The rows of those texts."""
        return [self.rows[prompt.index] for prompt in prompts]

    def served(self, rows: Floats) -> Floats:
        return rows


def _function(spec: str, module: str, name: str) -> Transform:
    if "" not in sys.path:
        sys.path.insert(0, "")
    try:
        found = getattr(importlib.import_module(module), name)
    except (ImportError, AttributeError) as error:
        raise InvalidRequestError(f"--transform {spec}: {error}") from error
    if not callable(found):
        raise InvalidRequestError(f"--transform {spec} is no function but {type(found).__name__}")
    function: UserFunction = found

    def on_rows(rows: Floats, prompt: AuditPrompt, rng: Rng) -> Floats:
        try:
            return function(rows.copy(), prompt.ids.copy(), rng)
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            raise InvalidRequestError(
                f"--transform {spec} failed at text {prompt.index + 1}: {type(error).__name__}: "
                f"{error} ({where.filename}, line {where.lineno})"
            ) from error

    return RowTransform(spec, on_rows)
