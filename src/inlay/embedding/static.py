"""Sparse vectors of texts by a weight for each id of the vocabulary, without a model.

As `SparseStaticEmbedding` of sentence-transformers: an id that stands in the text has its weight,
however often it stands there.
"""

import logging
from collections.abc import Mapping, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.embedding.cache import Bundle
from inlay.embedding.files import object_of
from inlay.tensors.named import read_arrays
from inlay.tensors.state_dict import open_state_dict
from inlay.tensors.tensor import NUMPY_DTYPES
from inlay.tensors.weight_files import find_pickled, find_weights

Weights: TypeAlias = npt.NDArray[np.float32]

_log = logging.getLogger(__name__)

_BY_TOKEN = "idf.json"


@lru_cache(maxsize=16)
def static_weights(directory: Path) -> Weights:
    """Return the weight of each id: float32 [V], of tensor `weight`. Kept; read-only.

    Raises `InvalidRequestError` if there is none, or no row of numbers.
    """
    found = _saved(directory)
    if found.ndim != 1 or not np.isfinite(found).all():
        raise InvalidRequestError(
            f"the weights of {directory} must be a number for each id of the vocabulary, got the "
            f"shape {list(found.shape)}"
        )
    found.flags.writeable = False
    return found


def served_weights(directory: Path) -> Weights:
    """As `static_weights`, for a frontend, which needs the files where the workers have them.

    Raises `EngineError` if it cannot read them; the log says why, as of a model's tokenizer.
    """
    try:
        return static_weights(directory)
    except (InlayError, OSError) as error:
        _log.error("cannot read a model's weights of queries, put them in %s: %s", directory, error)
        raise EngineError("this server cannot read the model's weights of queries") from error


def _saved(directory: Path) -> npt.NDArray[Any]:
    whole = find_weights(directory)
    if whole is not None:
        (file,) = whole.paths()
        return np.array(_weight(read_arrays(file.read_bytes())[0], file), np.float32)
    pickled = find_pickled(directory)
    if pickled is not None:
        (file,) = pickled.paths()
        with open_state_dict(file) as saved:
            arrays = {
                each.name: np.frombuffer(each.read().view, NUMPY_DTYPES[each.dtype]).reshape(
                    each.shape
                )
                for each in saved
            }
            return np.array(_weight(arrays, file), np.float32)
    return _by_token(directory)


def _weight(arrays: Mapping[str, npt.NDArray[Any]], file: Path) -> npt.NDArray[Any]:
    if "weight" not in arrays:
        raise InvalidRequestError(f"{file} has no tensor `weight`; it has {', '.join(arrays)}")
    return arrays["weight"]


def _by_token(directory: Path) -> npt.NDArray[Any]:
    """Return the weights of a file that names tokens; of others they are 0."""
    said = object_of(directory / _BY_TOKEN)
    if not said:
        raise InvalidRequestError(
            f"{directory} has no weights: neither a file of tensors nor {_BY_TOKEN}"
        )
    tokenizer = Tokenizer.from_file(str(directory / "tokenizer.json"))
    found = np.zeros(tokenizer.get_vocab_size(), np.float32)
    for token, weight in said.items():
        id_ = tokenizer.token_to_id(token)
        if id_ is None:
            raise InvalidRequestError(
                f"{directory / _BY_TOKEN} has a weight for {token[:80]!r}, which is no token of "
                "its vocabulary"
            )
        found[id_] = weight
    return found


def static_sparse(ids: Sequence[int], weights: Weights, most: int) -> Bundle:
    """Return the sparse vector of a text, of which the `most` largest are kept; 0 for all."""
    indices = np.unique(np.array(ids, np.int64))
    values = weights[indices]
    kept = values != 0
    return sparse(indices[kept], values[kept], most)


def sparse(indices: "npt.NDArray[Any]", values: "npt.NDArray[Any]", most: int) -> Bundle:
    """Return a sparse vector of ascending indices, of which the `most` largest values are kept."""
    if most and len(values) > most:
        kept = np.sort(np.argpartition(-values, most - 1)[:most])
        indices, values = indices[kept], values[kept]
    return {
        "sparse.indices": indices.astype(np.int32),
        "sparse.values": np.ascontiguousarray(values, np.float32),
    }
