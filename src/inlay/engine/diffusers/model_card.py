"""Bounds and metadata of a loaded pipeline or part."""

from importlib.metadata import version

from inlay.card import ImageCard, Limits, ModelCard
from inlay.digest import Secret
from inlay.engine.diffusers.checks import Bounds
from inlay.engine.diffusers.loading import Loaded
from inlay.engine.settings import EngineSettings
from inlay.request import Task

_MAX_ABS = 10_000.0
"""Largest element of embeddings unless the settings say otherwise: a text encoder's are normalised.

Rows of a batch do not mix, so that this spares only the one who sends more a useless image.
"""

_NO_EMBEDS = {
    "text_encoder": "it makes embeddings of text",
    "vae": "it decodes latents",
}


def bounds_of(settings: EngineSettings, loaded: Loaded) -> Bounds:
    """Return what a request may ask for."""
    max_abs = settings.max_prompt_embeds_abs
    return Bounds(
        facts=loaded.facts,
        part=loaded.part,
        max_pixels=settings.max_generated_image_size,
        max_steps=min(settings.max_inference_steps, loaded.facts.max_steps),
        max_abs=_MAX_ABS if max_abs is None else max_abs,
    )


def card_of(settings: EngineSettings, loaded: Loaded, bounds: Bounds, secret: Secret) -> ModelCard:
    """Return the metadata that the worker announces."""
    names, facts = settings.names, loaded.facts
    return ModelCard(
        name=names[0],
        aliases=tuple(names[1:]),
        path=str(loaded.path),
        weights_id=loaded.weights_id,
        dtype=str(loaded.dtype).removeprefix("torch."),
        vocab_size=0,
        hidden_size=facts.embeds["prompt_embeds"][-1],
        limits=Limits(
            max_model_len=facts.max_length,
            max_num_seqs=settings.max_num_seqs,
            max_prompt_embeds_abs=bounds.max_abs,
        ),
        engine="diffusers",
        engine_version=version("diffusers"),
        tasks=(Task.STAGE,),
        prompt_embeds=_NO_EMBEDS.get(loaded.part),
        secret_fingerprint=secret.fingerprint,
        image=ImageCard(
            width=facts.width,
            height=facts.height,
            multiple=facts.multiple,
            max_pixels=bounds.max_pixels,
            steps=facts.steps,
            max_steps=bounds.max_steps,
            guidance=facts.guidance,
            negative=facts.negative,
            empty_negative=facts.empty_negative and not facts.distilled,
            padded=facts.padded and not facts.distilled,
            embeds=dict(facts.embeds),
            part=loaded.part,
        ),
    )
