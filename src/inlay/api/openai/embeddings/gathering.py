"""Outputs of a request's inputs: made into prompts, looked up or computed, returned in order."""

import asyncio
import itertools
import time
import uuid
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, cast

import numpy as np
import numpy.typing as npt

from inlay.api.openai.embeddings.inputs import InputPiece, Inputs, chunks
from inlay.api.openai.schema.embeddings import TextsRequest, TextsUsage
from inlay.base.at_most import at_most
from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.base.pace import yield_gil
from inlay.embedding.bundles import FIRST_PORTS, STACKED, bundles_of, parts_of
from inlay.embedding.cache import Bundle
from inlay.embedding.static import static_sparse
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call
from inlay.messages.card import EmbeddingCard
from inlay.messages.digest import prompt_digest, root_digest
from inlay.messages.outputs import payloads_of
from inlay.messages.pooling import CHUNKS
from inlay.messages.request import Pooling, Task
from inlay.router import ServedModel

Array = npt.NDArray[np.float32]

_IN_FLIGHT = 16
"""Maximum running chunks of one request; the rest is tokenized later."""

_INPUT_BYTES = 64
"""Bytes of text that take as long to prepare as an input does beside its text."""

_PAIR_BYTES = 8
"""Bytes of an index and its weight."""


class Gathered(NamedTuple):
    """One input, and what the model gives for it."""

    piece: InputPiece
    bundle: Bundle


class WantedOutputs(NamedTuple):
    """Outputs that a request wants for each of its inputs.

    Attributes:
        names: outputs of the model, at least one.
        element_bytes: approximate bytes of a number in the answer.
        max_active: weights that are kept of a sparse vector; 0 for all.
        most: numbers of vectors for positions that the answer may have; None for any.
    """

    names: tuple[str, ...]
    element_bytes: int
    max_active: int = 0
    most: int | None = None


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


def first_output(model: ServedModel) -> str:
    """Return the output of requests that name none."""
    outputs = embedding_card(model).outputs
    if outputs:
        return outputs[0].name
    return "labels" if Task.SCORE in model.card.tasks else "dense"


class Gathering:
    """Outputs of one request's inputs.

    Attributes:
        positions: number of positions of the prompts made so far.
    """

    def __init__(
        self, call: Call, model: ServedModel, request: TextsRequest, wanted: WantedOutputs
    ) -> None:
        """Check what is `wanted`. Raises `InvalidRequestError` for what the model does not give."""
        self._card = embedding_card(model)
        self._named = bool(self._card.outputs)
        for name in wanted.names:
            if self._named or name != first_output(model):
                self._card.output(name, model.name)
        self._wanted = wanted
        self._call = call
        self._model = model
        self._id = uuid.uuid4().hex
        self._request = request
        self._numbers = itertools.count()
        self._numbers_shown = 0
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
        self._preparing = asyncio.Lock()

    async def gathered(self, inputs: Inputs) -> list[Gathered]:
        """Return what the model gives for `inputs`.

        The request ends when its client leaves or its time is up.

        Raises:
            InlayError: the model cannot take an input, no worker has room, or one failed.
            ClientGone: the client left; computations that nobody else waits for are cancelled.
        """
        call = self._call
        self._reserve_whole(len(inputs))
        out: list[Gathered | None] = [None] * len(inputs)
        stretches = list(chunks(inputs))
        async with RequestScope(call.server.inflight, call.receive, call.detach_deadline()):
            if len(stretches) == 1:
                await self._fill(inputs, *stretches[0], out)
            else:
                await at_most(
                    _IN_FLIGHT,
                    (partial(self._fill, inputs, *stretch, out) for stretch in stretches),
                )
        return cast("list[Gathered]", out)

    def _reserve_whole(self, count: int) -> None:
        """Reserve the memory of one vector of each input."""
        card, wanted = self._card, self._wanted
        if {*STACKED} & {*wanted.names}:
            self._call.reservation.grow(count * card.size * (4 + wanted.element_bytes))

    def _reserve(self, pieces: Sequence[InputPiece]) -> None:
        """Reserve the memory of what positions of some inputs have.

        Raises `InvalidRequestError` for more numbers than the answer may have.
        """
        card, wanted = self._card, self._wanted
        positions = sum(len(piece.prompt) for piece in pieces)
        size = 0
        for output in card.outputs:
            if output.name not in wanted.names:
                continue
            if output.name == "sparse":
                most = wanted.max_active or output.size
                each = positions if output.of_ids else len(pieces) * min(most, output.size)
                size += each * _PAIR_BYTES
            elif output.name not in STACKED:
                numbers = positions * output.size
                size += numbers * (4 + wanted.element_bytes)
                self._numbers_shown += numbers
        if CHUNKS in wanted.names:
            numbers = sum(len(piece.spans) - 1 for piece in pieces) * card.size
            size += numbers * (4 + wanted.element_bytes)
            self._numbers_shown += numbers
        if wanted.most is not None and self._numbers_shown > wanted.most:
            of, ask = "tokens", "base64 or safetensors"
            if CHUNKS in wanted.names:
                of, ask = "parts", "base64, with larger parts"
            raise InvalidRequestError(
                f"the vectors of {of} are over {wanted.most} numbers, which JSON does not hold "
                f"here: ask with encoding_format {ask}, or with fewer or shorter inputs",
                param="encoding_format",
            )
        try:
            self._call.reservation.grow(size)
        except InlayError as error:
            if "sparse" not in wanted.names or wanted.max_active:
                raise
            raise error.advising(
                "A sparse vector may have as many weights as the vocabulary has ids; max_active "
                "keeps the largest"
            ) from None

    async def _fill(
        self, inputs: Inputs, start: int, stop: int, out: list[Gathered | None]
    ) -> None:
        weight = _INPUT_BYTES * (stop - start)
        weight += 4 * sum(inputs.weight(index) for index in range(start, stop))
        server, names = self._call.server, self._wanted.names
        # One after another: in several threads they only take the interpreter's lock from each
        # other and from the event loop.
        async with self._preparing:
            prepared = await server.run_prepared(weight, self._prepared, inputs, start, stop)
        pieces, keys, made = prepared
        self._reserve(pieces)
        left = [place for place in range(len(pieces)) if place not in made]
        self.positions += sum(len(piece.prompt) for piece in pieces)

        async def compute(indices: Sequence[int]) -> list[Bundle]:
            await server.awake(self._model.card.name)
            # A key is of an input and an output; those of one input are computed together.
            lacking = [divmod(index, len(names)) for index in indices]
            places = {place: number for number, place in enumerate(dict(lacking))}
            asked = tuple(
                name
                for number, name in enumerate(names)
                if number in {number for _, number in lacking}
            )
            found = await self._joined([pieces[left[place]] for place in places], asked)
            return [parts_of(found[places[place]], names[number]) for place, number in lacking]

        bundles = await server.results.fetch(keys, compute)
        for index, place in enumerate(left):
            whole: dict[str, Any] = {}
            for bundle in bundles[index * len(names) : (index + 1) * len(names)]:
                whole |= bundle
            made[place] = whole
        for place, piece in enumerate(pieces):
            out[start + place] = Gathered(piece, made[place])

    async def _joined(self, pieces: Sequence[InputPiece], names: tuple[str, ...]) -> list[Bundle]:
        """As `_computed`; background work is computed together with that of other calls."""
        call = self._call
        plain = all(
            piece.second_from is None and piece.visible is None and not piece.spans
            for piece in pieces
        )
        if not (call.background and plain):
            return await self._computed(pieces, names)
        key = (self._root, self._task, names, self._named, self._wanted.max_active, call.client)
        positions = sum(len(piece.prompt) for piece in pieces)
        return await call.server.joining.results(
            key, pieces, positions, lambda some: self._computed(some, names)
        )

    async def _computed(self, pieces: Sequence[InputPiece], names: tuple[str, ...]) -> list[Bundle]:
        """Return bundles with the outputs `names` of each piece, which a worker computes."""
        pairs = any(piece.second_from is not None for piece in pieces)
        hides = any(piece.visible is not None for piece in pieces)
        request = self._call.engine_request(
            f"{self._id}-{next(self._numbers)}",
            Pooling(
                second_from=tuple(
                    len(piece.prompt) if piece.second_from is None else piece.second_from
                    for piece in pieces
                )
                if pairs
                else (),
                outputs=names if self._named else (),
                visible=tuple(
                    len(piece.prompt) if piece.visible is None else piece.visible
                    for piece in pieces
                )
                if hides
                else (),
                max_active=self._wanted.max_active if "sparse" in names else 0,
                spans=tuple(piece.spans for piece in pieces) if CHUNKS in names else (),
            ),
            tuple(piece.prompt for piece in pieces),
            task=self._task,
            adapter=self._model.adapter_name,
            cache_salt=self._request.cache_salt,
            priority=self._request.priority,
        )
        (stream,) = await self._call.server.router.send(self._model.card, [request])
        self._call.sent = self._call.sent or time.perf_counter()
        try:
            payloads = await payloads_of(stream)
        finally:
            stream.cancel()
        return bundles_of(payloads, len(pieces), names, {} if self._named else FIRST_PORTS)

    def _prepared(
        self, inputs: Inputs, start: int, stop: int
    ) -> tuple[list[InputPiece], list[bytes], dict[int, Bundle]]:
        """Return the pieces of some inputs, and of each a key for each output, or its bundle.

        A bundle, by the place of the piece, is of what needs no model.
        """
        pieces = inputs.pieces(start, stop)
        secret = self._call.server.secret
        keys, made = [], {}
        for place, piece in enumerate(pieces):
            yield_gil()
            if piece.static is not None:
                ids = piece.prompt.token_ids()
                made[place] = static_sparse(ids, piece.static, self._wanted.max_active)
                continue
            own = prompt_digest(piece.prompt, self._root, secret, second_from=piece.second_from)
            if piece.visible is not None:
                own += b"/%d" % piece.visible
            if piece.spans:
                own += "/{}".format(" ".join(map(str, piece.spans))).encode()
            for name in self._wanted.names:
                most = f" {self._wanted.max_active}" if name == "sparse" else ""
                keys.append(own + f".{name}{most}".encode())
        return pieces, keys, made


async def gather(
    call: Call, model: ServedModel, request: TextsRequest, inputs: Inputs, wanted: WantedOutputs
) -> tuple[list[Gathered], TextsUsage]:
    """Return what is `wanted` of a request's inputs, and the usage.

    Memory for it and for the response is reserved until the call ends. Raises as `Gathering`.
    """
    gathering = Gathering(call, model, request, wanted)
    found = await gathering.gathered(inputs)
    call.server.metrics.embedded(model.card.name, len(inputs), gathering.positions, call.began)
    return found, TextsUsage(gathering.positions, gathering.positions)


def bytes_of(found: Sequence[Gathered], usage: TextsUsage) -> int:
    """Return the bytes of what the model gave for inputs, and of their positions' ids."""
    arrays = sum(array.nbytes for each in found for array in each.bundle.values())
    return arrays + 4 * usage.prompt_tokens


def stacked(found: Sequence[Gathered], name: str) -> Array:
    """Return the vectors of an output that has one for each input: [inputs, size]."""
    vectors: Array = np.stack([each.bundle[name] for each in found])
    return vectors


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
