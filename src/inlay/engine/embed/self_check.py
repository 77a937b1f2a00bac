"""The self-check of models that make vectors or scores: against their own code's, before both.

Compared are states of every position before they are pooled: vectors of length 1 hide what differs.
Each channel counts by its own size, so that loud ones hide nothing in the others. Of models that
score, the logits of pairs are compared too.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from inlay.engine.embed.families import PoolingFamily
from inlay.engine.torch.self_check.judgement import Judgement, mean_ratio
from inlay.engine.torch.self_check.prompts import COUNT, WINDOW, CheckPrompt, check_prompts
from inlay.engine.torch.self_check.reference import (
    JITTER,
    VARIANTS,
    Capture,
    Reference,
    Scores,
    as_published,
    computed_by,
    relative,
    sampled_ids,
)
from inlay.messages.prompt import Prompt, Tokens

_PAIR, SECOND = "pair", 9
"""Kind of a prompt of two texts, and where the second begins."""

_NUM_SCORED = 8
"""Pairs of models that score: a pair has few logits, whose rounding has to even out."""


class CheckBatch(NamedTuple):
    """The prompts of a reference, as they are computed.

    Attributes:
        prompts: of the same length.
        second_from: start of each one's second text; its length if it has none.
        places: [T], positions in place of 0 to the length of each.
    """

    prompts: Sequence[Prompt]
    second_from: Sequence[int]
    places: npt.NDArray[np.int64]

    @classmethod
    def of(cls, prompts: Sequence[CheckPrompt]) -> "CheckBatch":
        """Lay out `prompts`."""
        return cls(
            [Prompt.of(Tokens(prompt.ids)) for prompt in prompts],
            [SECOND if prompt.kind == _PAIR else COUNT for prompt in prompts],
            np.concatenate([prompt.positions for prompt in prompts]),
        )


def narrowed(config: Any) -> int:
    """Return by how much sliding windows are smaller in the check, so that they count there.

    Not what is left of them: some layers count their own position, and some do not.
    """
    return max(0, (getattr(config, "sliding_window", None) or 0) - WINDOW)


class OwnPass(NamedTuple):
    """Results of a model's own code for prompts, `VARIANTS` times.

    Attributes:
        states: float32 [V, P, C].
        logits: float32 [V, K, L] of the whole model; None of a body alone.
        capture: rows of its modules.
        by: as in `Reference`.
    """

    states: Tensor
    logits: Tensor | None
    capture: Capture
    by: str


def vector_reference(
    model: Any,
    base: Any,
    directory: Path,
    family: PoolingFamily,
    max_model_len: int,
    first: int,
    *,
    scores: bool,
    draw: int = 0,
) -> Reference:
    """Run the own code of a model.

    Args:
        model: as transformers made it, on its device.
        base: its body.
        directory: its files.
        family: of the model.
        max_model_len: positions that it is served with.
        first: position id of a prompt's first token.
        scores: it computes logits of pairs.
        draw: of its prompts.
    """
    config = base.config.get_text_config()
    prompts = _prompts(config, directory, family, max_model_len, scores=scores, draw=draw)
    window = WINDOW if narrowed(config) else None
    found = _own_pass(model, base, family, first, prompts, window, scores=scores)
    channels = sampled_ids(found.states.shape[-1]).to(found.states.device)
    chosen = found.states[..., channels]
    scale = _scale(chosen[0])
    noise = torch.stack([_distance(free, chosen[0], scale) for free in chosen[1:]]).amax(0)
    sent = pool_prompts(prompts, scores=scores)
    pooled = _own_pass(model, base, family, first, sent, None, scores=scores, keeps=False)
    return Reference(
        tuple(prompts),
        found.by,
        channels.expand(len(noise), -1),
        chosen[0],
        noise,
        modules=found.capture.modules,
        scores=None if found.logits is None else _scores(found.logits, base.dtype),
        states=pooled.states if pooled.logits is None else pooled.logits,
    )


def pool_prompts(prompts: Sequence[CheckPrompt], *, scores: bool) -> list[CheckPrompt]:
    """Return those that clients can send, at positions without gaps: pairs if these have scores."""
    near = tuple(range(COUNT))
    return [
        prompt._replace(positions=near) for prompt in prompts if (prompt.kind == _PAIR) == scores
    ]


def _own_pass(
    model: Any,
    base: Any,
    family: PoolingFamily,
    first: int,
    prompts: Sequence[CheckPrompt],
    window: int | None,
    *,
    scores: bool,
    keeps: bool = True,
) -> OwnPass:
    batch = CheckBatch.of(prompts)
    ids = torch.tensor([prompt.ids for prompt in prompts], device=base.device).repeat(VARIANTS, 1)
    places = torch.from_numpy(batch.places).view(len(prompts), COUNT).to(base.device) + first
    places = places.repeat(VARIANTS, 1)
    seconds = torch.tensor(batch.second_from, device=base.device).repeat(VARIANTS)[:, None]
    given: dict[str, Any] = {
        "input_ids": ids,
        "position_ids": places.expand(family.rope_axes, -1, -1) if family.rope_axes > 1 else places,
        # Without it, a jump of positions would begin a packed sequence.
        "attention_mask": torch.ones_like(ids),
    }
    if family.token_types:
        given["token_type_ids"] = (torch.arange(COUNT, device=base.device) >= seconds).long()
    if family.causal:
        given["use_cache"] = False
    capture = Capture(base, (), len(prompts), keeps=keeps)
    found: list[Tensor] = []
    keep = base.register_forward_hook(lambda _, __, out: found.append(out.last_hidden_state))
    try:
        with torch.inference_mode(), as_published(model, window) as attention, capture.hooked():
            output = model(**given) if scores else base(**given)
    finally:
        keep.remove()
    states = found[0].float().view(VARIANTS, len(prompts) * COUNT, -1)
    logits = output.logits.float().view(VARIANTS, len(prompts), -1) if scores else None
    return OwnPass(states, logits, capture, computed_by(attention, base.dtype))


def _prompts(
    config: Any,
    directory: Path,
    family: PoolingFamily,
    max_model_len: int,
    *,
    scores: bool,
    draw: int,
) -> list[CheckPrompt]:
    """Return random ids far into the context, a text, and pairs."""
    random, text = check_prompts(directory, config.vocab_size, max_model_len, rows=False, draw=draw)
    near = tuple(range(COUNT))
    if family.native:
        # Positions are looked up one after another there.
        start = max(0, max_model_len - COUNT)
        random = random._replace(positions=tuple(range(start, start + COUNT)))
    generator = torch.Generator().manual_seed(21 + 100 * draw)
    count = _NUM_SCORED if scores else int(family.token_types)
    drawn = torch.randint(config.vocab_size, (count, COUNT), generator=generator).tolist()
    pairs = [CheckPrompt(_PAIR, tuple(ids), (), near) for ids in drawn]
    return [
        prompt._replace(ids=_without(config, prompt.ids))
        for prompt in (random, text._replace(positions=near), *pairs)
    ]


def _scores(variants: Tensor, dtype: torch.dtype) -> Scores:
    """Return logits of the first of [V, K, L], and how far rounding moves a typical one."""
    values = variants[0]
    moved = (variants[1:] - values) / _scale(values)
    return Scores(values, float(moved.square().mean().sqrt()) + JITTER[dtype])


def judge_vectors(
    states: Tensor, scores: Tensor | None, reference: Reference, floor: float
) -> Judgement:
    """Compare what was computed of the prompts of `reference` with its own.

    Args:
        states: [P, C], of the prompts laid end to end.
        scores: [K, L], their logits; None if the model makes none.
        reference: of the model.
        floor: errors below about it do not count.
    """
    own = states.float().gather(1, reference.ids)
    error = _distance(own, reference.logits, _scale(reference.logits)).view(-1, COUNT)
    noise = reference.noise.view(-1, COUNT)
    kinds = np.array([prompt.kind for prompt in reference.prompts])
    found: dict[str, float] = {}
    for kind in dict.fromkeys(kinds.tolist()):
        places = torch.from_numpy(kinds == kind).to(error.device)
        found[kind] = mean_ratio(error[places].flatten(), noise[places].flatten(), floor)
    if scores is not None and reference.scores is not None:
        found["scores"] = _scores_ratio(scores, reference.scores, floor)
    return Judgement(found, (), float(reference.noise.median()))


def _scores_ratio(found: Tensor, reference: Scores, floor: float) -> float:
    wanted = reference.values.to(found.device)
    error = ((found.float() - wanted) / _scale(wanted)).abs().flatten()
    return mean_ratio(error, torch.full_like(error, reference.noise), floor)


def _scale(states: Tensor) -> Tensor:
    """Return the size of each channel [M] of states [P, M]."""
    size = states.square().mean(0).sqrt()
    return size.clamp(min=float(size.mean()) * 1e-3)


def _distance(found: Tensor, expected: Tensor, scale: Tensor) -> Tensor:
    return relative(found / scale, expected / scale, expected / scale)


def _without(config: Any, ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return `ids` without padding, which some models do not see."""
    padding = getattr(config, "pad_token_id", None)
    other = 5 if padding != 5 else 6
    return tuple(other if token == padding else token for token in ids)
