"""Requests, as vLLM-Omni takes them."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from vllm_omni.inputs.data import OmniDiffusionSamplingParams

from inlay.messages.request import Payload
from inlay_stages.engines.diffusers.families import DiffusionFamily
from inlay_stages.engines.diffusers.image_pipeline import EMBEDS, NEGATIVE, check_length, tensor_of
from inlay_stages.params import Diffusion

_LENGTHS = ("prompt_embeds", f"{NEGATIVE}prompt_embeds")
"""Tensors of as many positions as their prompt, which go with a mask of them."""


def prompt_of(
    params: Diffusion, inputs: Mapping[str, Payload], dtype: torch.dtype
) -> dict[str, Any]:
    """Return the prompt of a checked request; embeddings in `dtype`, [positions, width]."""
    text = inputs.get("prompt")
    prompt: dict[str, Any] = {"modalities": ["image"]}
    if text is not None:
        prompt["prompt"] = bytes(text.data.view).decode()
    if params.negative is not None:
        prompt["negative_prompt"] = params.negative
    for port, given in inputs.items():
        if port == "prompt":
            continue
        name = port.removeprefix(EMBEDS)
        prompt[name] = tensor_of(given).to(dtype)
        if name in _LENGTHS:
            prompt[f"{name}_mask"] = torch.ones(given.shape[0], dtype=torch.long)
    return prompt


def check_lengths(family: DiffusionFamily, params: Diffusion, inputs: Mapping[str, Payload]) -> int:
    """Return the positions of the prompt. Raises `InvalidRequestError` for a text too long."""
    if params.negative is not None:
        check_length(family, params.negative, "negative_prompt")
    text = inputs.get("prompt")
    if text is None:
        return inputs[f"{EMBEDS}prompt_embeds"].shape[0]
    return check_length(family, bytes(text.data.view).decode(), "prompt")


def sampling_of(
    params: Diffusion, default: OmniDiffusionSamplingParams, pipeline: str
) -> OmniDiffusionSamplingParams:
    """Return the parameters of a request, over those of the deployment."""
    scale = {"guidance_scale": params.guidance}
    if pipeline.startswith("QwenImage"):
        # It takes 0 for "not given", and means 4.
        scale = {"true_cfg_scale": max(1.0, params.guidance)}
    return replace(
        default,
        width=params.width,
        height=params.height,
        num_inference_steps=params.steps,
        num_outputs_per_prompt=params.count,
        seed=params.seed,
        **scale,
    )
