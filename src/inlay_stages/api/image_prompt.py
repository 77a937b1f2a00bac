"""Prompts of images: text, or the tensors that a model's text encoders make of text."""

from collections.abc import Mapping

import msgspec

from inlay.api.openai.sources import embeds_source
from inlay.base.errors import (
    EmbeddingsError,
    EngineError,
    InvalidRequestError,
    NotFoundError,
    OverloadedError,
)
from inlay.http.bodies.embeds import TensorSource
from inlay.http.parsed_request import ParsedRequest
from inlay.http.references import embeddings_of
from inlay.http.server import Call
from inlay.messages.card import ModelCard
from inlay.messages.prompt import Buffer, Prompt, Rows
from inlay.messages.request import Payload
from inlay.router import Router
from inlay_stages.api.schema.images import ImagesRequest
from inlay_stages.cards import ImageCard, graph_of, image_card
from inlay_stages.params import Diffusion

_NEGATIVE = "negative_"
_FIELDS = ("prompt_embeds", "pooled_prompt_embeds", "negative_prompt_embeds")


def text_payload(port: str, text: str) -> Payload:
    data = text.encode()
    return Payload(port, "uint8", (len(data),), Buffer(data))


def sources_in(request: ImagesRequest) -> list[TensorSource]:
    """Return the sources of a request's embeddings, in order."""
    given = [(name, getattr(request, name)) for name in _FIELDS]
    return [embeds_source(value, name) for name, value in given if value is not None]


def has_all_embeds(request: ImagesRequest, card: ImageCard, params: Diffusion) -> bool:
    """Return True if a request brings all that text encoders would make of its prompts.

    Args:
        request: with a text, embeddings or both; embeddings win.
        card: of the model.
        params: of the request.

    Raises:
        InvalidRequestError: no prompt, or not the tensors that the model takes.
    """
    given = {source.param for source in sources_in(request)}
    taken = [*card.embeds]
    for name in given:
        if name.removeprefix(_NEGATIVE) not in taken:
            raise InvalidRequestError(
                f"this model takes no {name}; it takes {', '.join(taken) or 'text alone'}",
                param=name,
            )
        if name.startswith(_NEGATIVE) and not card.negative:
            raise InvalidRequestError(f"this model takes no {name}", param=name)
    missing = [name for name in taken if name not in given]
    if len(missing) == len(taken):
        if not request.prompt:
            raise InvalidRequestError(
                "At least one of 'prompt' or 'prompt_embeds' must be provided and not be empty.",
                param="prompt",
            )
        return False
    if missing:
        raise InvalidRequestError(
            f"{missing[0]} is missing: this model takes {' and '.join(taken)} together",
            param=missing[0],
        )
    guided = card.negative and params.guidance > 1
    guided_by_text = request.negative_prompt is not None or card.empty_negative
    return f"{_NEGATIVE}{taken[0]}" in given or not (guided and guided_by_text)


async def prompt_payloads(
    call: Call,
    incoming: ParsedRequest[ImagesRequest],
    request: ImagesRequest,
    card: ModelCard,
    params: Diffusion,
) -> list[Payload]:
    """Return the prompt as the stage that reads it takes it, checked in full.

    Args:
        call: the HTTP request.
        incoming: the parsed request.
        request: of which `has_all_embeds` has been asked.
        card: of the model, or of the stage of a pipeline that clients see.
        params: of the request.

    Raises:
        EmbeddingsError: embeddings that the model does not take.
        InlayError: as `ParsedRequest.embeddings`.
    """
    sources = sources_in(request)
    named = {source.param for source in sources}
    text = None if "prompt_embeds" in named else request.prompt
    payloads = [] if text is None else [text_payload("prompt", text)]
    if not sources:
        return payloads
    taker = embeds_card(call.server.router, card)
    image = image_card(taker)
    if image is None:
        raise EngineError(f"the stage `{taker.name}` does not describe its embeddings")
    found: dict[str, Rows] = {}
    for source in sources:
        size = image.embeds[source.param.removeprefix(_NEGATIVE)][-1]
        # Each tensor has a width of its own.
        own = msgspec.structs.replace(taker, hidden_size=size)
        try:
            embeddings = await embeddings_of(call, incoming, own, source)
            found[source.param] = await call.server.run_prepared(
                incoming.size, embeddings.one, source
            )
        except EmbeddingsError as error:
            raise error.at(source.param) from error
    for name in _FIELDS:
        setattr(request, name, None)
    call.memory.settle([Prompt.of(rows) for rows in found.values()], 0)
    _check_lengths(found, image, taker.limits.max_model_len, params)
    for name, rows in found.items():
        one = len(image.embeds[name.removeprefix(_NEGATIVE)]) == 1
        shape = rows.shape[1:] if one else rows.shape
        payloads.append(Payload(f"embeds.{name}", rows.dtype, shape, rows.data))
    return payloads


def embeds_card(router: Router, card: ModelCard) -> ModelCard:
    """Return the card of the model, or of the stage of its pipeline, that takes embeddings.

    Raises:
        OverloadedError: the stage has no worker that is ready.
    """
    graph = graph_of(card)
    stage = None if graph is None else graph.embeds_stage("image")
    if graph is None or stage is None:
        return card
    try:
        return router.card(graph.served_name(stage))
    except NotFoundError as error:
        raise OverloadedError(
            f"no worker of the stage {stage} of `{graph.name}` is ready", retry_after=1
        ) from error


def _check_lengths(
    found: Mapping[str, Rows], image: ImageCard, most: int, params: Diffusion
) -> None:
    for name, rows in found.items():
        one = len(image.embeds[name.removeprefix(_NEGATIVE)]) == 1
        allowed = 1 if one else most
        if not 1 <= len(rows) <= allowed:
            raise EmbeddingsError(
                f"{name} has {len(rows)} positions; this model reads "
                + ("1" if one else f"1 to {most}"),
                param=name,
                reason="shape",
            )
    if not image.padded or params.guidance <= 1:
        return
    lengths = [
        len(found[name]) if name in found else most
        for name in ("prompt_embeds", f"{_NEGATIVE}prompt_embeds")
    ]
    if lengths[0] != lengths[1]:
        raise EmbeddingsError(
            f"the prompt has {lengths[0]} positions and the negative prompt {lengths[1]}; with "
            f"guidance this model takes equal numbers, and its text encoder makes {most}",
            param="prompt_embeds",
            reason="shape",
        )
