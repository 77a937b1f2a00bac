"""The self-check of models that make vectors: their states against their own code's.

Compared are states of every position before they are pooled: vectors of length 1 hide what differs.
Each channel counts by its own size, so that loud ones hide nothing in the others.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from inlay.engine.torch.self_check.judgement import Judgement, mean_ratio
from inlay.engine.torch.self_check.prompts import COUNT, check_prompts
from inlay.engine.torch.self_check.reference import (
    VARIANTS,
    Capture,
    Reference,
    as_published,
    computed_by,
    relative,
    sampled_ids,
)
from inlay.prompt import Prompt, Tokens


def embedding_reference(base: Any, directory: Path, vocab_size: int, *, causal: bool) -> Reference:
    """Run the own code of a model.

    Args:
        base: body of the model as transformers made it, on its device.
        directory: its files.
        vocab_size: ids are below it.
        causal: it may keep keys and values, and is told not to.
    """
    prompts = [
        prompt._replace(ids=_without(base.config, prompt.ids))
        for prompt in check_prompts(directory, vocab_size, COUNT, rows=False)
    ]
    capture = Capture(base, (), len(prompts))
    ids = torch.tensor([prompt.ids for prompt in prompts], device=base.device)
    with torch.inference_mode(), as_published(base) as attention, capture.hooked():
        states: Tensor = base(
            input_ids=ids.repeat(VARIANTS, 1),
            attention_mask=torch.ones_like(ids).repeat(VARIANTS, 1),
            **({"use_cache": False} if causal else {}),
        ).last_hidden_state
    variants = states.float().view(VARIANTS, len(prompts) * COUNT, -1)
    channels = sampled_ids(states.shape[-1]).to(states.device)
    chosen = variants[..., channels]
    scale = _scale(chosen[0])
    noise = torch.stack([_distance(free, chosen[0], scale) for free in chosen[1:]]).amax(0)
    return Reference(
        tuple(prompts),
        computed_by(attention, base.dtype),
        channels.expand(len(noise), -1),
        chosen[0],
        torch.zeros_like(noise),
        noise,
        modules=capture.modules,
    )


def judge_states(states: Tensor, reference: Reference, floor: float) -> Judgement:
    """Compare states [P, C] of the prompts of `reference`, laid end to end, with its own.

    Errors below about `floor` do not count.
    """
    own = states.float().gather(1, reference.ids)
    error = _distance(own, reference.logits, _scale(reference.logits)).view(-1, COUNT)
    noise = reference.noise.view(-1, COUNT)
    found = {
        prompt.kind: mean_ratio(part, usual, floor)
        for prompt, part, usual in zip(reference.prompts, error, noise, strict=True)
    }
    return Judgement(found, (), float(noise.median()))


def prompts_of(reference: Reference) -> Sequence[Prompt]:
    """Return the prompts of `reference`."""
    return [Prompt.of(Tokens(prompt.ids)) for prompt in reference.prompts]


def _scale(states: Tensor) -> Tensor:
    """Return the size of each channel [M] of states [P, M]."""
    size = states.square().mean(0).sqrt()
    return size.clamp(min=float(size.mean()) * 1e-3)


def _distance(found: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
    return relative(found / scale, expected / scale, expected / scale)


def _without(config: Any, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return `ids` without padding, which some models do not see."""
    padding = getattr(config.get_text_config(), "pad_token_id", None)
    other = 5 if padding != 5 else 6
    return tuple(other if token == padding else token for token in ids)
