"""`POST /v1/encode`: images and audio to rows, which a chat takes as embeddings of them."""

import asyncio
import time
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import numpy.typing as npt
import orjson
import pybase64

from inlay.api.fields import answer_id, check_common, one_of
from inlay.api.generation.parts import kind_of, media_source
from inlay.api.openai.embeddings.gathering import check_count
from inlay.api.openai.schema.encode import (
    EncodedAudio,
    EncodedImage,
    EncodeRequest,
    EncodeResponse,
    EncodeUsage,
)
from inlay.base.errors import EngineError, InvalidRequestError
from inlay.http.bodies.embeds import Embeddings
from inlay.http.bodies.media import MediaSource
from inlay.http.parsed_request import read_request
from inlay.http.quoting import shown_at
from inlay.http.references import embeddings_of
from inlay.http.request_scope import RequestScope
from inlay.http.server import JSON_HEADER, Call
from inlay.media.embeds import grid_beside
from inlay.media.spec import MediaSpec
from inlay.messages.outputs import payloads_of
from inlay.messages.prompt import DTYPE_SIZES, Media, Prompt
from inlay.messages.request import PORTS, Payload, Pooling, Task
from inlay.router import ServedModel
from inlay.tensors import write
from inlay.tensors.tensor import NUMPY_DTYPES

_decoder = msgspec.json.Decoder(EncodeRequest)
_encode = msgspec.json.Encoder().encode

_IN_FLIGHT = 16
"""Maximum items of one request that are with workers at the same time."""

_PARTS = ("image_url", "input_image", "input_audio", "audio_url")
"""Types of parts. The rows of a video have no part that would take them."""

_FLOAT_BYTES = 14
"""Approximate bytes of an element as a number in JSON."""


async def encode(call: Call) -> None:
    """Answer with the rows of images and audio."""
    server = call.server
    incoming = await read_request(call, _decoder, sources_in)
    request = incoming.parsed.request
    check_common(call, request)
    id_ = answer_id("enc-", request.request_id)
    model = server.model(request.model, Task.ENCODE)
    sources = [source for source in incoming.sources if isinstance(source, MediaSource)]
    check_count(call, len(sources), "input")
    if not sources:
        raise InvalidRequestError("input must not be empty", param="input")
    embeddings = await embeddings_of(call, incoming, model.card)
    size = incoming.size + embeddings.num_fetched_bytes
    prompts = await server.run_prepared(size, _prompts, embeddings, sources)
    del incoming, embeddings
    call.memory.settle(prompts, 0)
    spec = model.card.media
    assert spec is not None, "only models with media have an encoder"
    count = sum(_media(prompt).total for prompt in prompts)
    call.reservation.grow(count * _row_bytes(model, request.encoding_format))
    found = await _Encoding(call, model, request).payloads(prompts)
    server.metrics.embedded(model.card.name, len(prompts), count, call.began)
    answer = await server.run_prepared(
        size + count * model.card.hidden_size,
        lambda: _encode(
            EncodeResponse(
                id=id_,
                created=int(time.time()),
                model=model.name,
                data=[
                    _element(index, spec, _media(prompt), payloads, request.encoding_format)
                    for index, (prompt, payloads) in enumerate(zip(prompts, found, strict=True))
                ],
                usage=EncodeUsage(count, count),
            )
        ),
    )
    await call.bytes(answer, JSON_HEADER)


def sources_in(request: EncodeRequest) -> list[MediaSource]:
    """Return the sources of a request's items, in order.

    Raises:
        InvalidRequestError: one is no image and no audio.
    """
    if not isinstance(request.input, list):
        return [_source(request.input, "input", 0)]
    return [_source(item, f"input[{index}]", index) for index, item in enumerate(request.input)]


def _source(item: str | dict[str, Any], param: str, index: int) -> MediaSource:
    part = {"type": _PARTS[0], _PARTS[0]: item} if isinstance(item, str) else item
    if one_of(kind_of(part), _PARTS, f"{param}.type") is None:
        raise InvalidRequestError(
            f"{param}.type must be one of {', '.join(_PARTS)}, got {shown_at(part, 'type')}",
            param=f"{param}.type",
        )
    return media_source(part, param, index)


def _prompts(embeddings: Embeddings, sources: Sequence[MediaSource]) -> list[Prompt]:
    """Return the prompt of each item. CPU work."""
    return [Prompt.of(*embeddings.media(source)) for source in sources]


def _media(prompt: Prompt) -> Media:
    return next(segment for segment in prompt.segments if isinstance(segment, Media))


def _row_bytes(model: ServedModel, encoding_format: str) -> int:
    """Return the bytes of a row while it is answered: from the worker, as a file, and as text."""
    card = model.card
    levels = 1 if card.media is None else 1 + card.media.deepstack
    size = DTYPE_SIZES[card.dtype]
    text = 2 * size if encoding_format == "base64" else _FLOAT_BYTES
    return levels * card.hidden_size * (2 * size + 2 * text)


class _Encoding:
    """The items of one HTTP request at workers."""

    def __init__(self, call: Call, model: ServedModel, request: EncodeRequest) -> None:
        self._call = call
        self._model = model
        self._request = request
        self._turns = asyncio.Semaphore(_IN_FLIGHT)

    async def payloads(self, prompts: Sequence[Prompt]) -> list[dict[str, Payload]]:
        """Return the payloads of each prompt by port.

        Raises:
            InlayError: a file is damaged, no worker has room, or one failed.
            ClientGone: the client left.
        """
        call = self._call
        async with RequestScope(call.server.inflight, call.receive, call.detach_deadline()):
            await call.server.awake(self._model.card.name, Task.ENCODE)
            try:
                async with asyncio.TaskGroup() as group:
                    tasks = [
                        group.create_task(self._one(index, prompt))
                        for index, prompt in enumerate(prompts)
                    ]
            except BaseExceptionGroup as failed:
                raise failed.exceptions[0] from failed
        return [task.result() for task in tasks]

    async def _one(self, index: int, prompt: Prompt) -> dict[str, Payload]:
        call = self._call
        async with self._turns:
            request = call.engine_request(
                f"{call.request_id}-{id(self):x}-{index}",
                Pooling(),
                (prompt,),
                task=Task.ENCODE,
                cache_salt=self._request.cache_salt,
                priority=self._request.priority,
            )
            (stream,) = await call.server.router.send(self._model.card, [request])
            try:
                found = {payload.port: payload for payload in await payloads_of(stream)}
            finally:
                stream.cancel()
        if PORTS[Task.ENCODE] not in found:
            raise EngineError(f"the worker ended the request without {PORTS[Task.ENCODE]}")
        return found


def _element(
    index: int,
    spec: MediaSpec,
    run: Media,
    payloads: dict[str, Payload],
    encoding_format: str,
) -> EncodedImage | EncodedAudio:
    """Return one element of the response. CPU work."""
    rows = media_rows(payloads)
    shown: Any
    if encoding_format == "base64":
        shown = pybase64.b64encode_as_string(write(rows, "torch"))
    else:
        shown = msgspec.Raw(
            orjson.dumps(rows.astype(np.float32), option=orjson.OPT_SERIALIZE_NUMPY)
        )
    if run.kind == "audio":
        return EncodedAudio(index=index, audio_embeds=shown, num_tokens=len(rows))
    grid = grid_beside(spec, run)
    return EncodedImage(
        index=index,
        image_embeds=shown,
        image_grid_thw=None if grid is None else list(grid),
        num_tokens=len(rows),
    )


def media_rows(payloads: Mapping[str, Payload]) -> npt.NDArray[Any]:
    """Return the rows of an item, (num_tokens, width), with its inner features after them."""
    ports = [PORTS[Task.ENCODE], *sorted(port for port in payloads if port.startswith("deepstack"))]
    return np.concatenate([_array(payloads[port]) for port in ports], axis=1)


def _array(payload: Payload) -> npt.NDArray[Any]:
    flat = np.frombuffer(payload.data.view, NUMPY_DTYPES[payload.dtype])
    return flat.reshape(payload.shape)
