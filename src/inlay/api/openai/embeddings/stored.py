"""Stored documents: outputs of an input that are kept, and compared without being computed again.

A document is a safetensors file of its outputs as similarity takes them: `dense` [size], `tokens`
[kept positions, size], `sparse.indices` and `sparse.values`. Its metadata has what they are of:
`weights_id`, `adapter`, `role`, and `model`, the name for error messages.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import numpy.typing as npt

from inlay.api.openai.embeddings.encoding import (
    DTYPES,
    About,
    EmbeddingAnswer,
    Encoding,
    json_answer,
)
from inlay.api.openai.embeddings.gathering import Gathered, WantedOutputs
from inlay.api.openai.embeddings.outputs import about_inputs, comparable
from inlay.api.openai.schema.embeddings import EmbeddingRequest
from inlay.base.at_most import at_most
from inlay.base.errors import InvalidRequestError
from inlay.base.pace import yield_gil
from inlay.embedding.bundles import parts_of
from inlay.embedding.cache import Bundle
from inlay.http.references import placed, store_for
from inlay.http.server import Call
from inlay.messages.card import EmbeddingCard
from inlay.messages.prompt import Buffer
from inlay.router import ServedModel
from inlay.store import NewVectors, StoredPrompt
from inlay.tensors.cast import cast
from inlay.tensors.named import read_arrays, write_arrays

_AT_ONCE = 16
"""Documents that are written or read at a time."""


def check_storable(request: EmbeddingRequest, names: Sequence[str], card: EmbeddingCard) -> None:
    """Raise `InvalidRequestError` for what a request cannot store."""
    if request.encoding_format not in (None, "float", "base64"):
        raise InvalidRequestError(
            f"store answers with references, in JSON; encoding_format is {request.encoding_format}",
            param="encoding_format",
        )
    if request.embed_dtype is not None and request.embed_dtype not in DTYPES:
        raise InvalidRequestError(
            f"embed_dtype {request.embed_dtype} is not stored; allowed: {', '.join(DTYPES)}",
            param="embed_dtype",
        )
    if "token_labels" in names:
        raise InvalidRequestError(
            "token_labels are not compared, so they are not stored; allowed: dense, sparse, tokens",
            param="outputs",
        )
    for name, changes in (
        ("normalize", request.normalize is False),
        ("use_activation", request.use_activation is False),
        ("endianness", request.endianness == "big"),
        ("dimensions", request.dimensions not in (None, card.size)),
    ):
        if changes:
            raise InvalidRequestError(
                f"{name} is of vectors in an answer; what is stored is what /v1/rerank compares",
                param=name,
            )


class DocumentFiles:
    """Makes the files of inputs.

    Args:
        request: that stores them.
        names: of the outputs.
        model: that gives them.
        card: of the model.
        role: of the inputs.
    """

    def __init__(
        self,
        request: EmbeddingRequest,
        names: tuple[str, ...],
        model: ServedModel,
        card: EmbeddingCard,
        role: str,
    ) -> None:
        self._encoding = Encoding("base64", request.embed_dtype or "float32")
        self._card = card
        self._role = role
        self._metadata = bound_to(model) | {"role": role, "model": model.name}
        size = np.dtype(DTYPES[self._encoding.dtype]).itemsize
        self.wanted = WantedOutputs(names, size, request.max_active or 0)

    def __call__(self, found: Sequence[Gathered], _: About) -> list[NewVectors]:
        """Return the file of each input. CPU work.

        Raises:
            InvalidRequestError: a value does not fit into the dtype.
        """
        return [self._file(each) for each in found]

    def _file(self, found: Gathered) -> NewVectors:
        bundle = comparable(found, self.wanted.names, self._card, self._role)
        arrays = {
            name: self._encoding.cast(array)[0] if array.dtype.kind == "f" else array
            for name, array in bundle.items()
        }
        return new_vectors(arrays, self._metadata, self._encoding.dtype)


def new_vectors(arrays: Bundle, metadata: Mapping[str, str], dtype: str) -> NewVectors:
    """Return the file of one input."""
    largest = max(arrays.values(), key=lambda array: array.size)
    shape = (1, largest.size) if largest.ndim == 1 else (len(largest), largest.shape[1])
    return NewVectors(Buffer(write_arrays(arrays, metadata)), shape, dtype)


def bound_to(model: ServedModel) -> dict[str, str]:
    """Return what vectors must share to be compared."""
    adapter = model.adapter
    return {
        "weights_id": model.card.weights_id,
        "adapter": "" if adapter is None else adapter.content_id,
    }


async def stored_answer(
    call: Call, files: Sequence[NewVectors], found: Sequence[Gathered], about: About
) -> EmbeddingAnswer:
    """Store the files of inputs, and return an answer with their references."""
    return json_answer(await kept(call, files), about, about_inputs(found))


async def kept(call: Call, files: Sequence[NewVectors]) -> list[dict[str, Any]]:
    """Store files, and return what an answer has of each."""
    store, tenant, hold = store_for(call), call.caller.tenant.id, call.reservation.grow
    stored = await at_most(
        _AT_ONCE, (partial(store.put, tenant, file.data, file, hold=hold) for file in files)
    )
    return [
        {
            # OpenAI's clients read it.
            "embedding": [],
            "ref": one.id,
            "num_vectors": one.shape[0],
            "expires_at": None if one.expires_at is None else int(one.expires_at),
        }
        for one in stored
    ]


async def stored_documents(
    call: Call, refs: Mapping[str, str], model: ServedModel, name: str, role: str
) -> dict[str, Bundle]:
    """Return an output of stored documents by their references.

    Args:
        call: the HTTP request.
        refs: path in the request of each reference.
        model: that they must be of.
        name: of the output.
        role: that they must have.

    Raises:
        InvalidRequestError: a reference that is not to vectors, or to those of another model,
            output or role.
        NotFoundError: no such document, or not the caller's.
        OverloadedError: reading them would exceed the memory budget.
    """
    if not refs:
        return {}
    store, tenant, grow = store_for(call), call.caller.tenant.id, call.reservation.grow

    def look(stored: StoredPrompt) -> None:
        grow(4 * stored.bytes if stored.dtype != "float32" else stored.bytes)

    async def one(ref: str, param: str) -> Buffer:
        with placed(param):
            return await store.file(tenant, ref, "vectors", look=look, hold=grow)

    read = await at_most(_AT_ONCE, (partial(one, ref, param) for ref, param in refs.items()))

    def checked() -> dict[str, Bundle]:
        found = {}
        for (ref, param), data in zip(refs.items(), read, strict=True):
            yield_gil()
            with placed(param):
                found[ref] = _checked(ref, data, model, name, role)
        return found

    return await call.server.run_prepared(sum(map(len, read)), checked)


def _checked(ref: str, data: Buffer, model: ServedModel, name: str, role: str) -> Bundle:
    arrays, metadata = read_arrays(data.view)
    for key, value in bound_to(model).items():
        if metadata.get(key) != value:
            raise InvalidRequestError(
                f"the stored {ref} is of the model `{metadata.get('model')}` with {key} "
                f"{metadata.get(key) or 'none'}; the model `{model.name}` has {value or 'none'}, "
                "whose vectors are others: store it again"
            )
    if metadata.get("role") != role:
        raise InvalidRequestError(
            f"the stored {ref} has the role {metadata.get('role')}; here stands a {role}: store it "
            f"with role {role}"
        )
    found = parts_of(arrays, name)
    if not found:
        has = ", ".join(sorted({key.partition(".")[0] for key in arrays}))
        raise InvalidRequestError(
            f"the stored {ref} has {has}; {name} is compared here: name another `output`, or store "
            f"it with outputs {name}"
        )
    return {
        key: array if array.dtype.kind in "iu" else _widened(array) for key, array in found.items()
    }


def _widened(array: npt.NDArray[Any]) -> npt.NDArray[np.float32]:
    bits = array.reshape(-1).view(f"u{array.itemsize}")
    return cast(bits, array.dtype.name, "float32").view(np.float32).reshape(array.shape)
