"""Vectors of a batch as one matrix: float32 [lines of the input file, width], NaN where none is.

While the batch runs its vectors are written as pieces of rows, each behind the number of its line.
At its end they are put in order. That takes 12 bytes a row, for its place, and a few pieces.
"""

import base64
import json
from collections.abc import Iterator, Sequence
from io import BytesIO
from typing import Any, Literal, NamedTuple

import msgspec
import numpy as np
import numpy.typing as npt

from inlay.store.kept.contents import PIECE_BYTES, Contents, Piece, new_name
from inlay_batches.lines import Outcome

NAME = "embeddings"
"""Name of the matrix in a safetensors file."""

Format = Literal["npy", "safetensors"]
_KEPT = 4
"""Pieces that are held while rows are put in order; they come nearly in order."""


class _EmbeddingItem(msgspec.Struct):
    embedding: str


class _EmbeddingAnswer(msgspec.Struct):
    data: list[_EmbeddingItem]


_answers = msgspec.json.Decoder(_EmbeddingAnswer)


class MatrixRow(NamedTuple):
    """Answer of a line, in two parts.

    Attributes:
        body: the answer without its data.
        vector: float32, little endian.
    """

    body: bytes
    vector: bytes


def with_base64(body: bytes) -> bytes:
    """Return a request, an object in JSON, that asks for base64 of whole float32 vectors."""
    inner = body[:-1].rstrip()
    comma = b"" if inner.endswith(b"{") else b","
    return inner + comma + b'"encoding_format":"base64","embed_dtype":"float32"}'


def row_of(body: bytes) -> MatrixRow | None:
    """Return the parts of an answer; None where it has not exactly one vector."""
    found = _answers.decode(body).data
    if len(found) != 1:
        return None
    whole: dict[str, Any] = msgspec.json.decode(body)
    whole["data"] = []
    return MatrixRow(msgspec.json.encode(whole), base64.b64decode(found[0].embedding))


def piece_of(outcomes: Sequence[Outcome]) -> bytes:
    """Return the rows of some lines as a piece: each the line's number, uint32, and its vector."""
    return b"".join(
        each.number.to_bytes(4, "little") + each.vector for each in outcomes if each.vector
    )


async def write_matrix(
    contents: Contents, pieces: Sequence[Piece], rows: int, width: int, form: Format
) -> list[Piece]:
    """Write the matrix of a batch as a file; its pieces.

    Args:
        contents: where the rows are, and where the file goes.
        pieces: of `piece_of`.
        rows: lines of the input file.
        width: elements of a vector.
        form: of the file.

    Raises:
        NotFoundError: a piece is gone.
        OverloadedError: the storage does not answer.
    """
    size = 4 + 4 * width
    which = np.full(rows, -1, np.int32)
    where = np.zeros(rows, np.int64)
    for index, piece in enumerate(pieces):
        numbers = _records(await contents.read(piece), size)["number"]
        which[numbers] = index
        where[numbers] = np.arange(len(numbers))
    held: dict[int, npt.NDArray[np.void]] = {}
    name = new_name("matrix")
    head = _head(rows, width, form)
    async with contents.whole() as written:
        for start, stop in _stretches(rows, max(1, PIECE_BYTES // (4 * width))):
            block = np.full((stop - start, width), np.nan, np.float32)
            for index in sorted({*which[start:stop].tolist()} - {-1}):
                if index not in held:
                    if len(held) >= _KEPT:
                        del held[min(held)]
                    held[index] = _records(await contents.read(pieces[index]), size)
                mine = np.flatnonzero(which[start:stop] == index)
                block[mine] = held[index]["vector"][where[start + mine]]
            data, head = head + block.astype("<f4").tobytes(), b""
            written.append(await contents.write(f"{name}-{len(written)}", data))
    return written


def _records(data: bytes, size: int) -> npt.NDArray[np.void]:
    kind = np.dtype([("number", "<u4"), ("vector", "<f4", ((size - 4) // 4,))])
    found: npt.NDArray[np.void] = np.frombuffer(data, kind)
    return found


def _stretches(rows: int, most: int) -> Iterator[tuple[int, int]]:
    for start in range(0, rows, most):
        yield start, min(start + most, rows)


def _head(rows: int, width: int, form: Format) -> bytes:
    if form == "npy":
        file = BytesIO()
        header = {"descr": "<f4", "fortran_order": False, "shape": (rows, width)}
        np.lib.format.write_array_header_1_0(file, header)
        return file.getvalue()
    size = 4 * rows * width
    entry = {"dtype": "F32", "shape": [rows, width], "data_offsets": [0, size]}
    text = json.dumps({NAME: entry}).encode()
    text += b" " * (-len(text) % 8)
    return len(text).to_bytes(8, "little") + text
