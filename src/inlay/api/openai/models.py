"""`GET /v1/models` and `GET /v1/models/{id}`."""

from collections.abc import Sequence
from typing import Literal, NamedTuple

import msgspec

from inlay.api.generation.hidden_states import may_read_states
from inlay.api.listed import listed
from inlay.api.openai.schema.models import (
    EmbeddingFacts,
    ImageFacts,
    MediaFacts,
    ModelEntry,
    ModelLimits,
    ModelList,
    OutputFacts,
)
from inlay.extension import parts
from inlay.http.server import Call
from inlay.messages.card import EmbeddingCard, ModelCard
from inlay.messages.request import Task
from inlay.router import ServedModel


async def list_models(call: Call) -> None:
    """Answer with every model, each under all its names, and with their adapters."""
    found = listed(call.server.router)
    await call.json(ModelList(data=[_entry(call, model, name) for name, model in found]))


async def one_model(call: Call) -> None:
    """Answer with the model the path names."""
    name = str(call.path_params["id"])
    await call.json(_entry(call, call.server.router.model(name), name))


def _embedding(card: EmbeddingCard | None) -> EmbeddingFacts | msgspec.UnsetType:
    if card is None:
        return msgspec.UNSET
    dimensions: list[int] | Literal["any"] = (
        "any" if card.any_dimensions else sorted({*card.dimensions, card.size})
    )
    outputs = [OutputFacts(each.name, each.size) for each in card.outputs]
    return EmbeddingFacts(
        card.size, card.normalize, dimensions, card.prompts, card.default_prompt, outputs
    )


_CAPABILITIES = {"image": "images", "audio": "audio", "video": "video"}
"""Capability of each kind of media."""


def _media(card: ModelCard, max_bytes: int) -> MediaFacts | msgspec.UnsetType:
    spec = card.media
    if spec is None or not spec.placeholders:
        return msgspec.UNSET
    counts = {str(kind): spec.max_items.get(kind) for kind in spec.placeholders}
    return MediaFacts(counts, spec.max_pixels, max_bytes, spec.embeds, spec.encoder_id)


class ModelFacts(NamedTuple):
    """Facts about a model that an extension serves: what its `Extension.facts` returns.

    Attributes:
        capabilities: beside those of the core.
        image: facts about the images that it makes.
        takes_embeds: card that says whether it takes embeddings; None while nobody says it.
    """

    capabilities: Sequence[str]
    image: ImageFacts | msgspec.UnsetType
    takes_embeds: ModelCard | None


def _facts(call: Call, card: ModelCard) -> ModelFacts:
    for _, describe in parts("facts"):
        found: ModelFacts | None = describe(call.server.router, card)
        if found is not None:
            return found
    return ModelFacts((), msgspec.UNSET, card)


def _entry(call: Call, model: ServedModel, name: str) -> ModelEntry:
    card, adapter = model.card, model.adapter
    settings = call.server.settings
    capabilities = []
    if Task.GENERATE in card.tasks:
        capabilities += ["completions", "chat", "responses", "messages"]
    if Task.EMBED in card.tasks:
        capabilities.append("embeddings")
    if Task.SCORE in card.tasks:
        # A score is one number; several labels are classes.
        one = card.embedding is None or card.embedding.size == 1
        capabilities += ["score", "rerank", "classify"] if one else ["classify"]
    if Task.ENCODE in card.tasks:
        capabilities.append("encode")
    facts = _facts(call, card)
    capabilities += facts.capabilities
    takes_embeds = facts.takes_embeds
    if settings.enable_prompt_embeds and takes_embeds and takes_embeds.prompt_embeds is None:
        capabilities.append("prompt_embeds")
        if settings.enable_embedding_lookup and Task.STAGE not in card.tasks:
            capabilities.append("embedding_lookup")
    if card.hidden_layers is not None and card.stage is None and may_read_states(call):
        capabilities.append("hidden_states")
    if card.media is not None and set(card.tasks) != {Task.ENCODE}:
        capabilities += [_CAPABILITIES[kind] for kind in card.media.placeholders]
    return ModelEntry(
        id=name,
        created=call.server.created,
        root=card.name if adapter is None else adapter.path,
        parent=None if adapter is None else card.name,
        max_model_len=model.max_len,
        hidden_size=card.hidden_size,
        vocab_size=card.vocab_size,
        dtype=card.dtype,
        embedding_table_id=card.embedding_table_id,
        embedding_abs_max=card.embedding_abs_max,
        weights_id=card.weights_id,
        weights_form=card.weights_form or msgspec.UNSET,
        engine=f"{card.engine} {card.engine_version}",
        capabilities=capabilities,
        limits=ModelLimits(
            max_model_len=model.max_len,
            max_logprobs=card.limits.max_logprobs,
            max_choices=settings.max_choices,
            max_prompt_embeds_bytes=call.server.limits.of(card).max_bytes,
            max_prompt_embeds_abs=card.limits.max_prompt_embeds_abs,
            max_body_bytes=settings.max_body_bytes,
        ),
        refusals=card.refusals,
        resuming=card.resuming,
        embedding=_embedding(card.embedding),
        media=_media(card, settings.max_media_bytes),
        image=facts.image,
        self_check=card.self_check or msgspec.UNSET,
        adapters=[] if adapter else [found.name for found in call.server.router.adapters(card)],
    )
