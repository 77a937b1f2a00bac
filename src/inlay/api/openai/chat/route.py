"""`POST /v1/chat/completions`."""

from functools import partial

import msgspec

from inlay.api.fields import answer_id
from inlay.api.generation.chat import chat_model, kind_of, prepare_chat
from inlay.api.generation.messages import read_messages, sources_in
from inlay.api.generation.respond import ResponseShape, respond
from inlay.api.openai.chat.shape import ChatShape
from inlay.api.schema.chat import ChatRequest
from inlay.http.parsed_request import read_request
from inlay.http.server import Call

_decoder = msgspec.json.Decoder(ChatRequest)


async def chat_completions(call: Call) -> None:
    """Answer one chat request."""
    incoming = await read_request(call, _decoder, lambda request: sources_in(request.messages))
    request = incoming.parsed.request
    response_id = answer_id("chatcmpl-", request.request_id)
    model = chat_model(call.server, request.model)
    kind = kind_of(request, model.card)
    # Before models of a row write for the one that answers.
    more = None if kind is None else await kind.responder(call, request, model.card, response_id)
    asked = await prepare_chat(
        call,
        incoming,
        request,
        model,
        response_id,
        partial(read_messages, request.messages),
        request,
    )
    del incoming
    generation = asked.generation
    stage = None if model.card.stage is None else model.card.name

    def text() -> ChatShape:
        return ChatShape(
            response_id, request, model.name, asked.renderer, generation, asked.use, stage
        )

    if more is None:
        await respond(call, request, model, generation, text)
        return
    more.begin(generation)

    def shape() -> ResponseShape:
        return more.shape(text())

    await respond(call, request, model, generation, shape, rest=more.rest)
