"""Chats of pipelines: models before the one that answers, an image or a sound behind its text."""

from collections.abc import Sequence
from typing import Any

from inlay.api.generation.chat_kinds import Prepare, Responder, UpstreamInput
from inlay.api.generation.generation import Generation
from inlay.api.generation.messages import MessageReader
from inlay.api.openai.chat.shape import ChatShape
from inlay.api.schema.chat import ChatRequest
from inlay.http.parsed_request import ParsedRequest
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call, Server
from inlay.http.sse import EventStream
from inlay.messages.card import ModelCard
from inlay.router import ServedModel
from inlay_stages.api.stage_request import all_awake
from inlay_stages.cards import graph_of
from inlay_stages.chat.audio import ChatAudio, SoundPlan, sound_plan
from inlay_stages.chat.audio_shape import AudioChatShape
from inlay_stages.chat.image import ChatImage, image_of
from inlay_stages.chat.image_shape import ImageChatShape
from inlay_stages.chat.upstream_models import adapters_before, resolve_model, run_upstream
from inlay_stages.walk import Step


class StageChats:
    """The chats of pipelines, and all that ask for an image or a sound."""

    def applies(self, request: ChatRequest, card: ModelCard) -> bool:
        """As `ChatKind`: what no pipeline makes is refused here too."""
        return True

    def model(self, server: Server, found: ServedModel) -> ServedModel:
        return resolve_model(server, found)

    async def responder(
        self, call: Call, request: ChatRequest, card: ModelCard, response_id: str
    ) -> Responder | None:
        """As `ChatKind`, once the stages that make the rest are awake."""
        image = image_of(call, request, card, response_id)
        sound = sound_plan(call, request, card)
        if sound is not None:
            await _awake(call, sound.speaker.steps)
            return _Sounds(call, request, sound, response_id)
        if image is not None:
            await _awake(call, image.steps)
            return _Draws(call, image)
        return None

    async def upstream(
        self,
        call: Call,
        incoming: ParsedRequest[Any],
        request: ChatRequest,
        card: ModelCard,
        response_id: str,
        messages: MessageReader,
        prepare: Prepare,
    ) -> UpstreamInput | None:
        graph = graph_of(card)
        if graph is None or not graph.before_text:
            return None
        adapters = adapters_before(call.server, request.model)
        return await run_upstream(
            call, incoming, request, graph, adapters, response_id, messages, prepare
        )


CHATS = StageChats()


async def _awake(call: Call, steps: Sequence[Step]) -> None:
    async with RequestScope(call.server.inflight, call.receive):
        await all_awake(call.server, steps)


class _Sounds:
    """An answer that is spoken while it is written."""

    def __init__(self, call: Call, request: ChatRequest, plan: SoundPlan, response_id: str) -> None:
        self._call = call
        self._request = request
        self._plan = plan
        self._id = response_id

    def begin(self, generation: Generation) -> None:
        self._generation = generation
        self._audio = ChatAudio(self._call, self._request, self._plan, generation, self._id)

    def shape(self, text: ChatShape) -> AudioChatShape:
        self._shape = AudioChatShape(text, self._generation, self._audio)
        return self._shape

    async def rest(self, stream: EventStream | None) -> None:
        await self._shape.speak(stream)


class _Draws:
    """An answer whose image follows its text."""

    def __init__(self, call: Call, image: ChatImage) -> None:
        self._call = call
        self._image = image

    def begin(self, generation: Generation) -> None:
        self._generation = generation

    def shape(self, text: ChatShape) -> ImageChatShape:
        self._shape = ImageChatShape(self._call, text, self._generation, self._image)
        return self._shape

    async def rest(self, stream: EventStream | None) -> None:
        await self._shape.draw(stream)
