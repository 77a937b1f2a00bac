"""Vectors of a request's inputs: made into prompts, looked up or computed, returned in order."""

import asyncio
import itertools
import uuid
from collections.abc import Callable, Sequence

import numpy as np
import numpy.typing as npt

from inlay.api.openai.embeddings.inputs import InputPiece, Inputs, chunks
from inlay.api.openai.schema.embeddings import TextsRequest, TextsUsage
from inlay.base.errors import EngineError, InvalidRequestError
from inlay.embedding.cache import Bundle
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call
from inlay.messages.card import EmbeddingCard
from inlay.messages.digest import prompt_digest, root_digest
from inlay.messages.outputs import payload_of
from inlay.messages.request import PORTS, Pooling, Task
from inlay.router import ServedModel

Array = npt.NDArray[np.float32]

_IN_FLIGHT = 16
"""Maximum running chunks of one request; the rest is tokenized later."""

_VECTOR = "vector"


def embedding_card(model: ServedModel) -> EmbeddingCard:
    """Return the embedding card of a model. Raises `EngineError` if its worker has none."""
    if model.card.embedding is None:
        raise EngineError(f"the worker of the model `{model.name}` does not describe its vectors")
    return model.card.embedding


def check_count(call: Call, count: int, param: str) -> None:
    """Raise `InvalidRequestError` for too many inputs."""
    most = call.server.settings.max_embedding_inputs
    if count > most:
        raise InvalidRequestError(
            f"{param} has {count} inputs; at most {most} are allowed (--max-embedding-inputs)",
            param=param,
        )


class Gathering:
    """Vectors of one request's inputs.

    Attributes:
        positions: number of positions of the prompts made so far.
    """

    def __init__(self, call: Call, model: ServedModel, request: TextsRequest) -> None:
        self._call = call
        self._model = model
        self._id = uuid.uuid4().hex
        self._request = request
        self._numbers = itertools.count()
        card = model.card
        self._task = Task.SCORE if Task.SCORE in card.tasks else Task.EMBED
        self._root = root_digest(
            call.server.secret,
            weights_id=card.weights_id,
            dtype=card.dtype,
            adapter=None if model.adapter is None else model.adapter.content_id,
            salt=call.caller.tenant.salted(request.cache_salt),
        )
        self.positions = 0

    async def vectors(self, inputs: Inputs, size: int) -> Array:
        """Return the vectors of `inputs` as the model gives them: float32 [inputs, size].

        The request ends when its client leaves or its time is up.

        Raises:
            InlayError: the model cannot take an input, no worker has room, or one failed.
            ClientGone: the client left; computations that nobody else waits for are cancelled.
        """
        call = self._call
        out: Array = np.empty((len(inputs), size), np.float32)
        stretches = list(chunks(inputs))
        async with RequestScope(call.server.inflight, call.receive, call.detach_deadline()):
            if len(stretches) == 1:
                await self._fill(inputs, *stretches[0], out)
                return out
            window = asyncio.Semaphore(_IN_FLIGHT)
            try:
                async with asyncio.TaskGroup() as group:
                    for start, stop in stretches:
                        await window.acquire()
                        task = group.create_task(self._fill(inputs, start, stop, out))
                        task.add_done_callback(lambda _: window.release())
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from failed
        return out

    async def _fill(self, inputs: Inputs, start: int, stop: int, out: Array) -> None:
        weight = 4 * sum(inputs.weight(index) for index in range(start, stop))
        server = self._call.server
        pieces, keys = await server.run_prepared(weight, self._prepared, inputs, start, stop)
        self.positions += sum(len(piece.prompt) for piece in pieces)

        async def compute(indices: Sequence[int]) -> list[Bundle]:
            await server.awake(self._model.card.name)
            chosen = [pieces[index] for index in indices]
            seconds = tuple(piece.second_from for piece in chosen if piece.second_from is not None)
            request = self._call.engine_request(
                f"{self._id}-{next(self._numbers)}",
                Pooling(second_from=seconds),
                tuple(piece.prompt for piece in chosen),
                task=self._task,
                adapter=self._model.adapter_name,
                cache_salt=self._request.cache_salt,
                priority=self._request.priority,
            )
            (stream,) = await server.router.send(self._model.card, [request])
            try:
                answer = await payload_of(stream, PORTS[self._task])
            finally:
                stream.cancel()
            rows = np.frombuffer(answer.data.view, np.float32).reshape(answer.shape)
            return [{_VECTOR: row} for row in rows]

        bundles = await server.results.fetch(keys, compute)
        for index, bundle in enumerate(bundles, start):
            out[index] = bundle[_VECTOR]

    def _prepared(
        self, inputs: Inputs, start: int, stop: int
    ) -> tuple[list[InputPiece], list[bytes]]:
        pieces = inputs.pieces(start, stop)
        secret = self._call.server.secret
        keys = [
            prompt_digest(piece.prompt, self._root, secret, second_from=piece.second_from)
            for piece in pieces
        ]
        return pieces, keys


async def vectors_of(
    call: Call, model: ServedModel, request: TextsRequest, inputs: Inputs, element_bytes: int
) -> tuple[Array, TextsUsage]:
    """Return the vectors of a request's inputs, [inputs, size], and the usage.

    Memory for them, and for a response of `element_bytes` for each element, is reserved until the
    call ends. Raises as `Gathering.vectors`.
    """
    size = embedding_card(model).size
    call.reservation.grow(len(inputs) * size * (4 + element_bytes))
    gathering = Gathering(call, model, request)
    found = await gathering.vectors(inputs, size)
    call.server.metrics.embedded(model.card.name, len(inputs), gathering.positions, call.began)
    return found, TextsUsage(gathering.positions, gathering.positions)


def normalized(vectors: Array) -> Array:
    """Return the vectors with length 1; a vector of zeros stays unchanged."""
    lengths = np.sqrt(np.einsum("ij,ij->i", vectors, vectors, dtype=np.float64))
    lengths[lengths == 0] = 1
    found: Array = (vectors / lengths[:, None]).astype(np.float32)
    return found


def _softmax(logits: Array) -> Array:
    exponentials = np.exp(logits - logits.max(axis=1, keepdims=True))
    found: Array = exponentials / exponentials.sum(axis=1, keepdims=True)
    return found


ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "identity": lambda logits: logits,
    "tanh": np.tanh,
    # Written so that no exponential overflows.
    "sigmoid": lambda logits: 0.5 * (1 + np.tanh(0.5 * logits)),
    "softmax": _softmax,
}
"""Activations by the names of `EmbeddingCard.activation`; float32 [inputs, labels] to the same."""


def activated(logits: Array, activation: str, use_activation: bool | None) -> Array:
    """Return `logits` [inputs, labels], activated unless `use_activation` is False."""
    return logits if use_activation is False else ACTIVATIONS[activation](logits)
