"""`POST /v1/chat/completions`."""

from functools import partial

import msgspec

from inlay.api.fields import answer_id
from inlay.api.generation.chat import prepare_chat
from inlay.api.generation.messages import read_messages
from inlay.api.generation.models_before import answering
from inlay.api.generation.parts import in_messages
from inlay.api.generation.respond import respond
from inlay.api.openai.chat.audio import ChatAudio, sound_plan
from inlay.api.openai.chat.audio_shape import AudioChatShape
from inlay.api.openai.chat.image import image_of
from inlay.api.openai.chat.image_shape import ImageChatShape
from inlay.api.openai.chat.shape import ChatShape
from inlay.api.openai.stage_request import all_awake
from inlay.api.schema.chat import ChatRequest
from inlay.http.parsed_request import read_request
from inlay.http.request_scope import RequestScope
from inlay.http.server import Call

_decoder = msgspec.json.Decoder(ChatRequest)


async def chat_completions(call: Call) -> None:
    """Answer one chat request."""
    incoming = await read_request(call, _decoder, lambda request: in_messages(request.messages))
    request = incoming.parsed.request
    response_id = answer_id("chatcmpl-", request.request_id)
    # Before models of a row write for the one that answers.
    answers = answering(call.server, request.model)
    model = answers.model
    image = image_of(call, request, model.card, response_id)
    sound = sound_plan(call, request, model.card)
    stages = sound.speaker.steps if sound is not None else () if image is None else image.steps
    if stages:
        async with RequestScope(call.server.inflight, call.receive):
            await all_awake(call.server, stages)
    asked = await prepare_chat(
        call,
        incoming,
        request,
        answers,
        response_id,
        partial(read_messages, request.messages),
        request,
    )
    del incoming
    generation = asked.generation
    stage = None if model.card.stage is None else model.card.name

    def shape() -> ChatShape:
        return ChatShape(
            response_id, request, model.name, asked.renderer, generation, asked.use, stage
        )

    if sound is not None:
        audio = ChatAudio(call, request, sound, generation, response_id)

        def spoken() -> AudioChatShape:
            return AudioChatShape(shape(), generation, audio)

        await respond(call, request, model, generation, spoken, rest=AudioChatShape.speak)
        return
    if image is None:
        await respond(call, request, model, generation, shape)
        return

    def drawn() -> ImageChatShape:
        return ImageChatShape(call, shape(), generation, image)

    await respond(call, request, model, generation, drawn, rest=ImageChatShape.draw)
