"""The image of a chat of a pipeline: drawn from the text that its language model has written."""

from collections.abc import Mapping
from contextlib import aclosing
from functools import partial

import pybase64

from inlay.api.schema.chat import ChatRequest
from inlay.base.errors import EngineError, InvalidRequestError
from inlay.http.quoting import shown_value
from inlay.http.server import Call
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Buffer
from inlay.messages.request import EngineUsage
from inlay_stages.api.image_prompt import text_payload
from inlay_stages.api.images import (
    FILE_BYTES_PER_PIXEL,
    image_params,
)
from inlay_stages.api.stage_request import all_awake, stage_request, take_places
from inlay_stages.cards import image_card
from inlay_stages.stage_result import StageResult
from inlay_stages.walk import plan, walk

_ONLY_WITH_IMAGES = (
    "size", "num_inference_steps", "guidance_scale", "negative_prompt", "output_format"
)  # fmt: skip


_MODALITIES = ({"text"}, {"text", "image"}, {"text", "audio"})


class ChatImage:
    """The image that belongs to one answer.

    Attributes:
        steps: of the plan.
        stage: that makes it.
        text_stage: that writes the text.
        usages: of the stages that have ended, by name.
    """

    def __init__(self, call: Call, request: ChatRequest, model: ModelCard, id_: str) -> None:
        """Plan it, before anything is computed. Use `image_of`.

        Raises:
            InvalidRequestError: the model draws nothing, or not so.
            OverloadedError: a stage has no worker that is ready.
            RateLimitedError: a stage is full.
        """
        if model.stage is None or "image" not in model.stage.outputs:
            raise InvalidRequestError(
                f'modalities has "image"; the model `{model.name}` makes text alone',
                param="modalities",
            )
        if (request.n or 1) > 1:
            raise InvalidRequestError(
                f"n is {request.n}; an answer with an image is one", param="n"
            )
        router = call.server.router
        self.usages: Mapping[str, EngineUsage] = {}
        self.text_stage = model.stage.name
        self.steps = plan(router, model, "image", text=True)
        self.stage = self.steps[-1].model
        card = image_card(router.card(self.stage))
        if card is None:
            raise EngineError(f"the worker of the stage {self.stage} does not describe its images")
        self._params = image_params(request, card)
        call.reservation.grow(self._params.width * self._params.height * FILE_BYTES_PER_PIXEL)
        take_places(call, self.steps)
        self._make = partial(stage_request, call, id_, self._params, request.priority or 0)
        self._call = call
        self._writer = model.name

    async def draw(self, text: str) -> Buffer:
        """Return the file of the image of an answer's text.

        Raises:
            InvalidRequestError: the answer is empty: there is nothing to draw.
            InlayError: as `inlay_stages.walk.walk`.
        """
        if not text.strip():
            raise InvalidRequestError("the model wrote no text to draw", param="modalities")
        given: dict[str | None, StageResult] = {
            self._writer: StageResult([text_payload("text", text)])
        }
        router, hold = self._call.server.router, self._call.reservation.grow
        file: Buffer | None = None
        await all_awake(self._call.server, self.steps)
        async with aclosing(walk(router, self.steps, given, self._make, hold)) as outputs:
            async for found in outputs:
                self.usages = {str(name): used for name, used in found.usages.items()}
                for payload in found.payloads:
                    if payload.port == "image":
                        file = payload.data
        if file is None:
            raise EngineError(f"the stage {self.stage} ended without an image")
        return file

    def url(self, file: Buffer) -> str:
        """Return a file of `draw` as a data: URL."""
        data = pybase64.b64encode_as_string(file.view)
        return f"data:image/{self._params.image_format};base64,{data}"


def image_of(call: Call, request: ChatRequest, model: ModelCard, id_: str) -> ChatImage | None:
    """Return the image that a chat asks for, or None.

    Raises:
        InvalidRequestError: unknown modalities, or fields of an image without one.
        InlayError: as `ChatImage`.
    """
    wanted = ["text"] if request.modalities is None else request.modalities
    if set(wanted) not in _MODALITIES:
        raise InvalidRequestError(
            f'modalities is {shown_value(wanted)}; allowed: ["text"], ["text", "image"] and '
            '["text", "audio"]',
            param="modalities",
        )
    if "image" in wanted:
        return ChatImage(call, request, model, id_)
    for name in _ONLY_WITH_IMAGES:
        if getattr(request, name) is not None:
            raise InvalidRequestError(
                f'{name} is of an image; ask for one with modalities ["text", "image"]', param=name
            )
    return None
