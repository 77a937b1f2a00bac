"""Upload of vectors: a safetensors file, as answers have it, becomes a stored document an input."""

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

from inlay.api.openai.embeddings.encoding import About, json_answer
from inlay.api.openai.embeddings.gathering import embedding_card, normalized
from inlay.api.openai.embeddings.roles import DOCUMENT, QUERY
from inlay.api.openai.embeddings.stored import bound_to, kept, new_vectors
from inlay.api.openai.schema.embeddings import TextsUsage
from inlay.base.errors import EngineError, InvalidRequestError
from inlay.http.parsed_request import read_file
from inlay.http.server import Call
from inlay.messages.card import EmbeddingCard
from inlay.messages.pooling import OutputCard
from inlay.messages.prompt import Buffer
from inlay.messages.request import Task
from inlay.router import ServedModel
from inlay.store import NewVectors
from inlay.tensors.named import read_arrays

Arrays = Mapping[str, npt.NDArray[Any]]
_STORED = ("dense", "sparse", "tokens")

_COPIES = 4
"""Copies in float32 that numbers of a file take at most: theirs, two for length 1, that of it."""


async def upload_vectors(call: Call, name: str | None) -> None:
    """Store the outputs of each input in a file, and answer as `store` of /v1/embeddings does.

    Args:
        call: the HTTP request.
        name: of the model; None for the first that makes vectors.
    """
    data = await read_file(call, lambda _: None)
    model = call.server.model(name, Task.EMBED)
    most = call.server.settings.max_embedding_inputs
    hold = call.reservation.grow
    files = await call.server.run_prepared(len(data), _files, data, model, most, hold)
    about = About(f"embd-{uuid.uuid4().hex}", int(time.time()), model.name, TextsUsage(0, 0))
    shown = await kept(call, files)
    answer = json_answer(shown, about, [{}] * len(shown))
    await call.bytes(answer.body, answer.media)


def _files(
    data: Buffer, model: ServedModel, most: int, hold: Callable[[int], None]
) -> list[NewVectors]:
    """Return the file of each of at most `most` inputs, once `hold` has taken memory. CPU work."""
    try:
        arrays, metadata = read_arrays(data.view)
    except EngineError as error:
        raise _wrong(error.message) from None
    own = model.card.weights_id
    if metadata.get("weights_id") != own:
        raise _wrong(
            f"it is of weights {metadata.get('weights_id', 'that it does not name')[:80]}, and the "
            f"model `{model.name}` has {own}, whose vectors are others"
        )
    role = metadata.get("role", DOCUMENT)
    if role not in (QUERY, DOCUMENT):
        raise _wrong(f"its role is {role[:80]!r}; allowed: {QUERY}, {DOCUMENT}")
    card = embedding_card(model)
    counts = [array.size - 1 for name, array in arrays.items() if name.endswith(".offsets")]
    if max([0, *counts, *arrays.get("dense", np.zeros(0)).shape[:1]]) > most:
        raise _wrong(f"it has over {most} inputs (--max-embedding-inputs)")
    numbers = sum(arrays[port].size for port in map(_port, _STORED) if port in arrays)
    hold(_COPIES * 4 * numbers)
    parts: list[list[dict[str, npt.NDArray[Any]]]] = [
        _parts(arrays, output, card)
        for output in card.outputs
        if output.name in _STORED and _port(output.name) in arrays
    ]
    if not parts:
        raise _wrong(f"it has none of {', '.join(_STORED)}")
    if len({len(part) for part in parts}) > 1:
        raise _wrong("its outputs are not of equally many inputs")
    said = bound_to(model) | {"role": role, "model": model.name}
    found = []
    for each in zip(*parts, strict=True):
        whole: dict[str, npt.NDArray[Any]] = {}
        for part in each:
            whole |= part
        found.append(new_vectors(whole, said, "float32"))
    return found


def _port(name: str) -> str:
    return "sparse.values" if name == "sparse" else name


def _parts(
    arrays: Arrays, output: OutputCard, card: EmbeddingCard
) -> list[dict[str, npt.NDArray[Any]]]:
    """Return an output of each input, as similarity takes it."""
    name = output.name
    values = arrays[_port(name)]
    if values.dtype.kind not in "fiV" or (f"{name}.scale" in arrays and values.ndim != 2):
        raise _wrong(f"{name} has no numbers")
    values = values.astype(np.float32, copy=False)
    if f"{name}.scale" in arrays:
        scale = arrays[f"{name}.scale"]
        if scale.shape != values.shape[:1] or not (scale > 0).all():
            raise _wrong(f"{name}.scale has not one positive factor for each vector")
        values = (values / scale[:, None]).astype(np.float32, copy=False)
    if not np.isfinite(values).all():
        raise _wrong(f"{name} has values that are not finite")
    if name == "sparse":
        return _sparse(arrays, values, output)
    if values.ndim != 2 or values.shape[1] != output.size:
        raise _wrong(f"{name} has the shape {list(values.shape)}; the model gives {output.size}")
    if name == "dense":
        return [{name: row} for row in values]
    if output.normalize:
        values = normalized(values)
    return [{name: rows} for rows in _split(arrays, name, values)]


def _sparse(
    arrays: Arrays, values: npt.NDArray[np.float32], output: OutputCard
) -> list[dict[str, npt.NDArray[Any]]]:
    indices = arrays.get("sparse.indices", np.zeros(0, np.int32))
    if indices.dtype.kind not in "iu" or indices.shape != values.shape or values.ndim != 1:
        raise _wrong("sparse.indices are not an id for each of sparse.values")
    if len(indices) and not 0 <= int(indices.min()) <= int(indices.max()) < output.size:
        raise _wrong(f"sparse.indices must be 0 to {output.size - 1}")
    both = zip(
        _split(arrays, "sparse", indices.astype(np.int32)),
        _split(arrays, "sparse", values),
        strict=True,
    )
    found: list[dict[str, npt.NDArray[Any]]] = []
    for own, weights in both:
        if (np.diff(own) <= 0).any():
            raise _wrong("sparse.indices of an input must ascend")
        found.append({"sparse.indices": own, "sparse.values": weights})
    return found


def _split(arrays: Arrays, name: str, values: npt.NDArray[Any]) -> list[npt.NDArray[Any]]:
    offsets = arrays.get(f"{name}.offsets", np.zeros(0, np.int64))
    fits = (
        offsets.ndim == 1
        and offsets.dtype.kind in "iu"
        and len(offsets) > 1
        and offsets[0] == 0
        and offsets[-1] == len(values)
        and (np.diff(offsets.astype(np.int64)) >= 0).all()
    )
    if not fits:
        raise _wrong(f"{name}.offsets are not where the {len(values)} of each input begin")
    return np.split(values, offsets[1:-1].astype(np.int64))


def _wrong(why: str) -> InvalidRequestError:
    return InvalidRequestError(
        f"this is no file of vectors of this model: {why}; an answer of /v1/embeddings with "
        "encoding_format safetensors is one",
        param="data",
    )
