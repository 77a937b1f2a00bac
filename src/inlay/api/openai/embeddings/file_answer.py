"""An answer of vectors as one safetensors file.

`dense` [inputs, size]; `tokens` [positions, size] with `tokens.offsets` [inputs + 1], where those
of each input begin, and `tokens.ids` (-1 of embeddings and media); `sparse.indices` and
`sparse.values` with `sparse.offsets`; of int8 also `dense.scale` and `tokens.scale`;
`input_tokens` [inputs]. The metadata has id, model, `weights_id`, role and the usage.
"""

from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from inlay.api.openai.embeddings.encoding import About, EmbeddingAnswer, Encoding
from inlay.api.openai.embeddings.gathering import Array, Gathered
from inlay.api.openai.embeddings.outputs import ids_of, rows_of
from inlay.messages.card import EmbeddingCard
from inlay.messages.pooling import OutputCard
from inlay.tensors.named import write_arrays

FILE_TYPE = b"application/safetensors"
_MEDIA = (b"content-type", FILE_TYPE)


def file_answer(
    found: Sequence[Gathered],
    dense: Array | None,
    outputs: Sequence[OutputCard],
    encoding: Encoding,
    about: About,
    *,
    card: EmbeddingCard,
    role: str | None,
    normalize: bool | None,
    weights_id: str,
) -> EmbeddingAnswer:
    """Return the file. CPU work.

    Args:
        found: of each input what the model gives.
        dense: [inputs, size], as the request wants them; None for none.
        outputs: the other outputs of the request, of `card`.
        encoding: of the vectors.
        about: of the answer.
        card: of the model.
        role: of the inputs.
        normalize: give vectors of tokens length 1; the model's setting if None.
        weights_id: of the model.

    Raises:
        InvalidRequestError: a value does not fit into the dtype.
    """
    counts = [len(each.piece.prompt) for each in found]
    arrays: dict[str, npt.NDArray[Any]] = {"input_tokens": np.array(counts, np.int32)}
    if dense is not None:
        _put(arrays, "dense", dense, encoding)
    for output in outputs:
        if output.name == "sparse":
            for part in ("indices", "values"):
                pieces = [each.bundle[f"sparse.{part}"] for each in found]
                arrays[f"sparse.{part}"] = np.concatenate(pieces)
            arrays["sparse.offsets"] = _offsets(pieces)
            continue
        rows = [rows_of(each, output, card, role, normalize) for each in found]
        _put(arrays, output.name, np.concatenate([one.values for one in rows]), encoding)
        arrays[f"{output.name}.offsets"] = _offsets([one.values for one in rows])
        arrays[f"{output.name}.ids"] = np.concatenate(
            [_ids(each)[one.positions] for each, one in zip(found, rows, strict=True)]
        )
    metadata = {
        "id": about.id,
        "model": about.model,
        "weights_id": weights_id,
        "prompt_tokens": str(about.usage.prompt_tokens),
    }
    if role is not None:
        metadata["role"] = role
    return EmbeddingAnswer(write_arrays(arrays, metadata), _MEDIA)


def _put(
    arrays: dict[str, npt.NDArray[Any]], name: str, vectors: Array, encoding: Encoding
) -> None:
    arrays[name], scale = encoding.cast(vectors)
    if scale is not None:
        arrays[f"{name}.scale"] = scale


def _ids(found: Gathered) -> npt.NDArray[np.int32]:
    return np.array([-1 if id_ is None else id_ for id_ in ids_of(found.piece.prompt)], np.int32)


def _offsets(pieces: Iterable[npt.NDArray[Any]]) -> npt.NDArray[np.int64]:
    return np.cumsum([0, *map(len, pieces)], dtype=np.int64)
