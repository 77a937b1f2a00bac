"""Facts of `/v1/models` about pipelines and models that make images."""

import msgspec

from inlay.api.openai.models import ModelFacts
from inlay.api.openai.schema.models import ImageFacts
from inlay.base.errors import OverloadedError
from inlay.messages.card import ModelCard
from inlay.messages.request import Task
from inlay.router import Router
from inlay_stages.api.image_prompt import embeds_card
from inlay_stages.cards import image_card


def describe(router: Router, card: ModelCard) -> ModelFacts | None:
    """Return the facts about a model that makes images; None of others."""
    if Task.STAGE in card.tasks:
        return ModelFacts(("image_generation",), _image(card), _embeds_card(router, card))
    if Task.GENERATE in card.tasks and card.stage and "image" in card.stage.outputs:
        return ModelFacts(("image_output",), _image(card), card)
    return None


def _image(card: ModelCard) -> ImageFacts | msgspec.UnsetType:
    image = image_card(card)
    if image is None:
        return msgspec.UNSET
    return ImageFacts(
        width=image.width,
        height=image.height,
        max_pixels=image.max_pixels,
        steps=image.steps,
        guidance=image.guidance,
        embeds=image.embeds,
        positions=card.limits.max_model_len if image.padded else None,
    )


def _embeds_card(router: Router, card: ModelCard) -> ModelCard | None:
    try:
        return embeds_card(router, card)
    except OverloadedError:
        return None
