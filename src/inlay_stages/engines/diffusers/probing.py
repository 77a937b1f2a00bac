"""The request that shows that a pipeline, or a part, works."""

import torch

from inlay.messages.priority import FIRST
from inlay.messages.prompt import Buffer
from inlay.messages.request import Input, Payload, Request, Task
from inlay_stages.engines.diffusers.facts import Facts
from inlay_stages.engines.diffusers.image_pipeline import EMBEDS, payload
from inlay_stages.engines.diffusers.loading import Part
from inlay_stages.params import Diffusion

_SIDE = 64
"""Pixels of a side at least."""
_POSITIONS = 8
"""Of the prompt, where it is embeddings."""


def text_payload(text: str, port: str = "prompt") -> Payload:
    data = text.encode()
    return Payload(port, "uint8", (len(data),), Buffer(data))


def probe_request(id_: str, facts: Facts, part: Part) -> tuple[Request, Diffusion]:
    """Return a request for a small image, in one step and without guidance, or for its part.

    And its parameters.
    """
    side = facts.multiple * -(-_SIDE // facts.multiple)
    if part in ("pipeline", "text_encoder"):
        inputs = [text_payload("a")]
    elif part == "vae":
        inputs = [_zeros("latents", (1, *facts.latent_shape(side, side)))]
    else:
        inputs = [
            _zeros(EMBEDS + name, tuple(_POSITIONS if size == -1 else size for size in shape))
            for name, shape in facts.embeds.items()
        ]
    params = Diffusion(width=side, height=side, steps=1)
    request = Request(
        id=id_,
        task=Task.STAGE,
        prompts=(),
        params=params,
        inputs=tuple(Input(each.port, each) for each in inputs),
        priority=FIRST,
    )
    return request, params


def _zeros(port: str, shape: tuple[int, ...]) -> Payload:
    return payload(port, torch.zeros(shape))
