"""Bounds and metadata of a loaded pipeline or part."""

from importlib.metadata import version
from typing import NamedTuple

from inlay.engine.extension_options import section_of
from inlay.engine.settings import EngineSettings
from inlay.messages.card import Limits, ModelCard, SelfCheck
from inlay.messages.digest import Secret
from inlay.messages.request import Task
from inlay_stages.cards import ImageCard
from inlay_stages.engines.diffusers.checks import ImageBounds
from inlay_stages.engines.diffusers.facts import Facts
from inlay_stages.engines.diffusers.loading import Part
from inlay_stages.options import StageOptions

_LEAST_PIXELS, _MOST_PIXELS = 64 * 64, 2048 * 2048
"""Of an image at most unless a setting says otherwise, where the model's own size allows it."""
_MAX_ABS = 10_000.0
"""Largest element of embeddings unless the settings say otherwise: a text encoder's are normalised.

Rows of a batch do not mix, so that this spares only the one who sends more a useless image.
"""

_NO_EMBEDS = {
    "text_encoder": "it makes embeddings of text",
    "vae": "it decodes latents",
}


class DescribedPipeline(NamedTuple):
    """A loaded pipeline or part, as its card names it.

    Attributes:
        engine: name of the library that runs it.
        path: directory of the pipeline.
        weights_id: 32 hex digits, of all that decides what it makes.
        dtype: of the models.
        previews: it gives images so far.
        self_check: result of its check at start.
    """

    engine: str
    path: str
    weights_id: str
    dtype: str
    previews: bool = True
    self_check: SelfCheck | None = None


def bounds_of(settings: EngineSettings, facts: Facts, part: Part) -> ImageBounds:
    """Return what a request may ask for."""
    asked = section_of(settings, StageOptions)
    max_abs, own = settings.limits.max_prompt_embeds_abs, facts.width * facts.height
    large = max(_LEAST_PIXELS, 4 * own)
    max_steps = min(asked.max_inference_steps, facts.max_steps)
    return ImageBounds(
        facts=facts,
        part=part,
        max_pixels=asked.max_generated_image_size or max(own, min(large, _MOST_PIXELS)),
        max_cost=max_steps * large // 4
        if asked.max_image_cost is None
        else int(asked.max_image_cost * own),
        max_steps=max_steps,
        max_abs=_MAX_ABS if max_abs is None else max_abs,
    )


def card_of(
    settings: EngineSettings, bounds: ImageBounds, secret: Secret, described: DescribedPipeline
) -> ModelCard:
    """Return the metadata that the worker announces."""
    names, facts = settings.model.names, bounds.facts
    return ModelCard(
        name=names[0],
        aliases=tuple(names[1:]),
        path=described.path,
        weights_id=described.weights_id,
        dtype=described.dtype,
        vocab_size=0,
        hidden_size=facts.embeds["prompt_embeds"][-1] if facts.embeds else 0,
        limits=Limits(
            max_model_len=facts.max_length,
            max_num_seqs=settings.batch.max_num_seqs,
            max_prompt_embeds_abs=bounds.max_abs,
        ),
        engine=described.engine,
        engine_version=version(described.engine),
        tasks=(Task.STAGE,),
        prompt_embeds=_NO_EMBEDS.get(bounds.part) if facts.embeds else "it takes text alone",
        secret_fingerprint=secret.fingerprint,
        self_check=described.self_check,
        image=ImageCard(
            width=facts.width,
            height=facts.height,
            multiple=facts.multiple,
            max_pixels=bounds.max_pixels,
            steps=facts.steps,
            max_steps=bounds.max_steps,
            max_cost=bounds.max_cost,
            guidance=facts.guidance,
            negative=facts.negative,
            empty_negative=facts.empty_negative and not facts.distilled,
            padded=facts.padded and not facts.distilled,
            embeds=dict(facts.embeds),
            part=bounds.part,
            previews=described.previews,
        ),
    )
