"""`POST /v1/images/generations`: images of a prompt, whole or as events."""

import re
import secrets
import time
from collections.abc import AsyncIterator, Mapping, Sequence
from contextlib import aclosing
from typing import NamedTuple, Protocol

import msgspec
import pybase64

from inlay.api.fields import answer_id, check_unserved
from inlay.api.generation.respond import stages_of
from inlay.api.generation.sampling import seed_of
from inlay.api.listed import first_that
from inlay.base.errors import EngineError, InlayError, InvalidRequestError
from inlay.http.errors import shown
from inlay.http.parsed_request import read_request
from inlay.http.quoting import shown_value
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call, Server
from inlay.http.sse import NAMED, EventStream, named_event
from inlay.messages.card import ModelCard
from inlay.messages.request import EngineUsage, Input, Payload, Request, Task
from inlay_stages.api.image_prompt import has_all_embeds, prompt_payloads, sources_in
from inlay_stages.api.schema.failure import StreamFailure
from inlay_stages.api.schema.images import (
    CompletedImage,
    ImageData,
    ImageFormat,
    ImagesRequest,
    ImagesResponse,
    ImagesUsage,
    ImageTokens,
    PartialImage,
)
from inlay_stages.api.stage_request import all_awake, stage_request, take_places
from inlay_stages.cards import ImageCard, check_image_cost, graph_of, image_card
from inlay_stages.params import Diffusion
from inlay_stages.stage_result import StageResult
from inlay_stages.walk import StageOutput, plan, walk

_decoder = msgspec.json.Decoder(ImagesRequest)
_SIZE = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,4})")
FILE_BYTES_PER_PIXEL = 8
"""Of an image's file while it is answered: from the worker, and in base64. PNG is at most 4."""


async def images(call: Call) -> None:
    """Answer with images."""
    server = call.server
    incoming = await read_request(call, _decoder, sources_in)
    request = incoming.parsed.request
    check_unserved(request)
    _check(call, request)
    card, adapters = painter_of(server, request.model)
    image = image_card(card)
    if image is None:
        raise EngineError(f"the worker of the model `{card.name}` does not describe its images")
    params = image_params(request, image, count=request.n or 1, partial=request.partial_images or 0)
    complete = has_all_embeds(request, image, params)
    output = "preview" if request.partial_images else "image"
    steps = plan(server.router, card, output, embeds=complete)
    payloads = await prompt_payloads(call, incoming, request, card, params)
    del incoming
    id_ = answer_id("img-", request.request_id)
    call.reservation.grow(params.count * params.width * params.height * FILE_BYTES_PER_PIXEL)
    take_places(call, steps, params.count)
    given: dict[str | None, StageResult] = {None: StageResult(payloads)}

    def make(stage: str, inputs: Sequence[Input]) -> Request:
        made = stage_request(call, id_, params, request.priority or 0, stage, inputs)
        return msgspec.structs.replace(made, adapter=adapters.get(stage))

    stream = EventStream(call.send, NAMED)
    shape = _Shape(request, params)
    try:
        async with RequestScope(call.server.inflight, call.receive, call.detach_deadline()):
            await all_awake(server, steps)
            async with aclosing(
                walk(server.router, steps, given, make, call.reservation.grow)
            ) as outputs:
                await _take(call, outputs, shape, stream if request.stream else None)
    except InlayError as error:
        if not stream.started:
            raise
        call.failed = error
        server.metrics.failed(error)
        await stream.finish([StreamFailure.of(shown(error))])
        return
    size = sum(len(image) for image in shape.images)
    if request.stream:
        await stream.finish([await server.run_prepared(size, shape.completed)])
        return
    await call.prepared_json(size, shape.response)


class PainterModel(NamedTuple):
    """A model that makes images.

    Attributes:
        card: of the stage that clients see.
        adapters: name of the adapter of a stage, by the name that it is served under.
    """

    card: ModelCard
    adapters: Mapping[str, str] = {}


def painter_of(server: Server, name: str | None) -> PainterModel:
    """Return a model that makes images of prompts, or has an adapter; the first without a name.

    Raises:
        InvalidRequestError: the model, or any, makes none; or only in chats.
        InlayError: as `Server.model`.
    """
    if name is None:
        found = first_that(server, lambda card: card.image is not None, "makes images of a prompt")
        return PainterModel(found)
    card = server.card(name)
    if card.image is None and card.stage is not None and "image" in card.stage.outputs:
        # Clients see the model that writes the text which the image is of: it says where to ask.
        plan(server.router, card, "image")
    model = server.model(name, Task.STAGE)
    card, adapter = model.card, model.adapter
    if card.audio is not None:
        raise InvalidRequestError(
            f"The model `{card.name}` speaks, and makes no images: use POST /v1/audio/speech.",
            param="model",
        )
    graph, router = graph_of(card), server.router
    if adapter is None or graph is None:
        return PainterModel(card, {} if adapter is None else {card.name: adapter.name})
    # A file may have matrices of the text encoders and of the denoiser, which are several stages.
    served = {*map(graph.served_name, graph.stages)}
    having = [
        one.name
        for one in router.models()
        if one.name in served and any(adapter.name == each.name for each in router.adapters(one))
    ]
    return PainterModel(server.card(graph.name), dict.fromkeys(having, adapter.name))


async def _take(
    call: Call, outputs: AsyncIterator[StageOutput], shape: "_Shape", stream: EventStream | None
) -> None:
    """Keep images; write an event for each preview, where there is a stream."""
    async for found in outputs:
        shape.usages = found.usages
        for payload in found.payloads:
            if payload.port == "image":
                shape.images.append(bytes(payload.data.view))
            elif stream is not None and shape.is_further(payload.port):
                size = len(payload.data)
                await stream.write([await call.server.run_prepared(size, shape.partial, payload)])
    if len(shape.images) != shape.params.count:
        raise EngineError(f"the worker made {len(shape.images)} of {shape.params.count} images")


def _check(call: Call, request: ImagesRequest) -> None:
    """Raise `InvalidRequestError` for fields that do not go together."""
    if request.response_format not in (None, "b64_json"):
        raise InvalidRequestError(
            f"response_format is {shown_value(request.response_format)}; allowed: b64_json, as no "
            "files are kept for a URL",
            param="response_format",
        )
    if request.stream and (request.n or 1) > 1:
        raise InvalidRequestError(
            f"n is {request.n}; a stream has one image: ask for more without stream, or in more "
            "requests",
            param="n",
        )
    if request.partial_images and not request.stream:
        raise InvalidRequestError("partial_images needs stream", param="partial_images")
    if request.priority and call.server.settings.scheduling_policy != "priority":
        raise InvalidRequestError(
            f"priority {request.priority} was asked for; this server serves first come, first "
            "served unless it is started with --scheduling-policy priority",
            param="priority",
        )


class ImageOptions(Protocol):
    """Fields of a request that are of its images."""

    size: str | None
    num_inference_steps: int | None
    guidance_scale: float | None
    negative_prompt: str | None
    output_format: ImageFormat | None
    seed: int | None


def image_params(
    request: ImageOptions, card: ImageCard, *, count: int = 1, partial: int = 0
) -> Diffusion:
    """Return the parameters of images, checked as far as the card says.

    Args:
        request: has the fields.
        card: of the model that makes them.
        count: number of images.
        partial: images so far that are to be shown.

    Raises:
        InvalidRequestError: a value out of range; the message says what is allowed.
    """
    width, height = _size(request.size, card)
    steps = card.steps if request.num_inference_steps is None else request.num_inference_steps
    if not 1 <= steps <= card.max_steps:
        raise InvalidRequestError(
            f"num_inference_steps is {steps}; allowed: 1 to {card.max_steps}",
            param="num_inference_steps",
        )
    check_image_cost(width, height, steps, own=(card.width, card.height), most=card.max_cost)
    if request.guidance_scale is not None and card.guidance is None:
        raise InvalidRequestError("this model takes no guidance_scale", param="guidance_scale")
    guidance = card.guidance if request.guidance_scale is None else request.guidance_scale
    if request.negative_prompt is not None and not card.negative:
        raise InvalidRequestError("this model takes no negative_prompt", param="negative_prompt")
    if partial and not card.previews:
        raise InvalidRequestError(
            f"partial_images is {partial}; this model gives whole images alone: 0",
            param="partial_images",
        )
    seed = seed_of(request.seed)
    return Diffusion(
        width=width,
        height=height,
        steps=steps,
        guidance=1.0 if guidance is None else guidance,
        seed=secrets.randbits(63) if seed is None else seed,
        count=count,
        negative=request.negative_prompt,
        preview_every=-(-steps // (partial + 1)) if partial else 0,
        image_format=request.output_format or "png",
    )


def _size(size: str | None, card: ImageCard) -> tuple[int, int]:
    if size in (None, "auto"):
        return card.width, card.height
    found = _SIZE.fullmatch(size or "")
    if found is None:
        raise InvalidRequestError(
            f'size is {size!r}; it must be "auto" or WIDTHxHEIGHT in pixels', param="size"
        )
    width, height = int(found[1]), int(found[2])
    if width % card.multiple or height % card.multiple or width * height > card.max_pixels:
        raise InvalidRequestError(
            f"size is {size}; sides are multiples of {card.multiple}, with at most "
            f"{card.max_pixels} pixels (--max-generated-image-size)",
            param="size",
        )
    return width, height


class _Shape:
    """The answer to a request, in OpenAI's form.

    Attributes:
        params: of the request.
        images: files, as they came.
        usages: of the stages by name; None of a model that is none.
    """

    def __init__(self, request: ImagesRequest, params: Diffusion) -> None:
        self._created = int(time.time())
        self._partial = self._shown = 0
        self.params = params
        self.images: list[bytes] = []
        self.usages: Mapping[str | None, EngineUsage] = {}

    @property
    def _pixels(self) -> str:
        return f"{self.params.width}x{self.params.height}"

    def is_further(self, port: str) -> bool:
        """Return True for a preview, "preview.STEPS", that is nearer to the image than all others.

        Where a stage is repeated, another preview may be left out than before.
        """
        steps = int(port.partition(".")[2] or self._shown + 1)
        further, self._shown = steps > self._shown, max(steps, self._shown)
        return further

    def partial(self, payload: Payload) -> bytes:
        """Return the event of a preview, encoded."""
        index, self._partial = self._partial, self._partial + 1
        return named_event(
            PartialImage(
                b64_json=_base64(payload.data.view),
                partial_image_index=index,
                created_at=self._created,
                output_format=self.params.image_format,
                size=self._pixels,
            )
        )

    def completed(self) -> bytes:
        """Return the event of the image, encoded."""
        return named_event(
            CompletedImage(
                b64_json=_base64(self.images[0]),
                created_at=self._created,
                output_format=self.params.image_format,
                size=self._pixels,
                usage=self._usage(),
            )
        )

    def response(self) -> ImagesResponse:
        """Return the whole response."""
        return ImagesResponse(
            created=self._created,
            data=[ImageData(_base64(image)) for image in self.images],
            output_format=self.params.image_format,
            size=self._pixels,
            usage=self._usage(),
        )

    def _usage(self) -> ImagesUsage:
        # The first stage reads the prompt, the others what it made of it; the last has the images.
        usages = [*self.usages.values()] or [EngineUsage(0, 0)]
        read, made = usages[0].prompt_tokens, usages[-1].completion_tokens
        return ImagesUsage(read, made, read + made, ImageTokens(read), stages_of(self.usages))


def _base64(data: bytes | memoryview) -> str:
    return pybase64.b64encode_as_string(data)
