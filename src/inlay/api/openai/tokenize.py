"""`POST /tokenize` and `POST /detokenize`."""

from collections.abc import Sequence
from typing import Any

import msgspec

from inlay.api.fields import check_depths, check_ids, check_unserved
from inlay.api.generation.messages import read_texts
from inlay.api.openai.schema.tokenize import (
    DetokenizeRequest,
    DetokenizeResponse,
    TokenizeRequest,
    TokenizeResponse,
)
from inlay.base.errors import InvalidRequestError
from inlay.http.parsed_request import read_json
from inlay.http.server import Call
from inlay.messages.card import ModelCard
from inlay.render import Renderer

_tokenize = msgspec.json.Decoder(TokenizeRequest)
_detokenize = msgspec.json.Decoder(DetokenizeRequest)


async def tokenize(call: Call) -> None:
    """Answer with the ids of a text or of a chat."""
    server = call.server
    request = await read_json(call, _tokenize)
    check_unserved(request)
    card = server.card(request.model)
    renderer = await server.renderers.of(card)
    await call.json(await server.run_prepared(call.memory.json, _tokens, request, card, renderer))


def _tokens(request: TokenizeRequest, card: ModelCard, renderer: Renderer) -> TokenizeResponse:
    if (request.prompt is None) == (request.messages is None):
        raise InvalidRequestError("give exactly one of prompt and messages", param="prompt")
    if request.messages is None:
        special = request.add_special_tokens is not False
        ids = renderer.encode(request.prompt or "", add_special_tokens=special)
    else:
        ids = _chat(request, request.messages, renderer)
    names = [renderer.token(id_) or "" for id_ in ids] if request.return_token_strs else None
    return TokenizeResponse(len(ids), card.limits.max_model_len, list(ids), names)


def _chat(
    request: TokenizeRequest, raw: Sequence[dict[str, Any]], renderer: Renderer
) -> tuple[int, ...]:
    check_depths(request, "messages", "tools", "chat_template_kwargs")
    messages = read_texts(raw, "embeddings and media have no tokens to show")
    continues = bool(request.continue_final_message)
    prompt = renderer.chat(
        messages,
        tools=request.tools,
        add_generation_prompt=not continues
        if request.add_generation_prompt is None
        else request.add_generation_prompt,
        continue_final_message=continues,
        template_kwargs=request.chat_template_kwargs or {},
    )
    if request.add_special_tokens:
        prompt = renderer.with_special_tokens(prompt)
    return prompt.token_ids()


async def detokenize(call: Call) -> None:
    """Answer with the text of ids."""
    server = call.server
    request = await read_json(call, _detokenize)
    card = server.card(request.model)
    renderer = await server.renderers.of(card)
    ids = request.tokens
    if len(ids) > card.limits.max_model_len:
        raise InvalidRequestError(
            f"tokens has {len(ids)} ids; at most {card.limits.max_model_len} are allowed, the "
            "model's maximum context length (--max-model-len)",
            param="tokens",
        )
    check_ids(ids, card.vocab_size, "tokens")
    text = await server.run_prepared(
        call.memory.json, renderer.decode, ids, skip_special_tokens=False
    )
    await call.json(DetokenizeResponse(text))
