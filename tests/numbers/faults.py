"""Faults that an engine may have, each made in a loaded model within a context.

They are made by hooks, attributes and values of the loaded `CausalModel`, whatever its modules were
replaced by: so the same fault goes into tiny lifelike models and into published ones.

    with FAULTS["scores 1.41 times as large"].into(model) as made:
        ...          # `made` is False where the model has no such part: nothing is changed

A fault is of a *kind* where all layers, the cache, the head or positions have it, and of an
*instance* where one layer, head or product has it. Trained layers are redundant, and the logits of
large models may be blind to an instance: those are found by looking at the layer itself.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from inlay.engine.torch.batch import Batch
from inlay.engine.torch.model import CausalModel
from inlay.engine.torch.weights.fused import FusedAttention, FusedGated
from inlay.engine.torch.weights.linear import RotaryTable
from inlay.engine.torch.weights.linear_methods import LinearMethod, QuantisedLinear
from tests.numbers import heads
from tests.numbers.seeding import AttentionChange, Seeding


@dataclass(frozen=True)
class Fault:
    """A fault.

    Attributes:
        make: changes a model.
        instance: one layer, head or product has it alone.
    """

    make: Callable[[Seeding], None]
    instance: bool = False

    @contextmanager
    def into(self, model: CausalModel) -> Iterator[bool]:
        """Make it within this context; False if the model has no such part."""
        with Seeding(model) as into, torch.no_grad():
            _forget_angles(into)
            self.make(into)
            yield bool(into.changed)
        _forget_angles(into)


def _forget_angles(into: Seeding) -> None:
    for module in into.whole.modules():
        if isinstance(module, RotaryTable):
            module.clear()


def _one_more(into: Seeding, norms: list[Any]) -> None:
    """A weight for one plus it, or the reverse."""
    kind = into.whole.config.get_text_config().model_type
    adds = kind.startswith(("gemma", "qwen3_next", "qwen3_5")) and not kind.startswith("gemma4")
    for norm in norms:
        if "RMSNorm" in type(norm).__name__:
            into.fill(norm.weight, norm.weight + (-1 if adds else 1))


def _loudest(into: Seeding) -> list[Any]:
    return sorted(into.norms(), key=lambda norm: -float(norm.weight.abs().max()))[:1]


def _last_norm(into: Seeding) -> Any:
    body = into.whole.base_model
    return getattr(body, "norm", None) or body.final_layernorm


def _frequencies(into: Seeding, change: Callable[[Tensor, dict[str, Any]], Tensor]) -> None:
    """Change the angles a position of each pair of channels."""
    ropes = into.whole.config.get_text_config().rope_parameters
    for module in into.whole.modules():
        for name, values in list(module.named_buffers(recurse=False)):
            if name.endswith("inv_freq") and "original" not in name:
                own = ropes.get(name.removesuffix("_inv_freq"), ropes)
                new = change(values, own)
                if not torch.equal(new, values):
                    into.fill(values, new)


def _unscaled(values: Tensor, rope: dict[str, Any]) -> Tensor:
    if rope.get("rope_type", "default") in ("default", "proportional"):
        return values / 8
    return _powers(values, rope["rope_theta"])


def _powers(values: Tensor, theta: float) -> Tensor:
    return theta ** -(torch.arange(len(values)) / len(values))


def _slowest(values: Tensor, rope: dict[str, Any]) -> Tensor:
    start = len(values) * 3 // 4
    return torch.cat([values[:start], _unscaled(values, rope)[start:]])


def _half(values: Tensor, _: dict[str, Any]) -> Tensor:
    return torch.cat([values[: len(values) // 2], 0 * values[len(values) // 2 :]])


def _where(
    test: Callable[[Seeding], object], make: Callable[[Seeding], None]
) -> Callable[[Seeding], None]:
    """Make it in models that have the part."""

    def made(into: Seeding) -> None:
        if test(into):
            make(into)

    return made


def _windowed(into: Seeding) -> bool:
    layers = into.model.layers
    return any(isinstance(shape.window, int) and not shape.state_size for shape in layers)


def _with_sinks(into: Seeding) -> bool:
    return bool(into.named("sinks"))


def _grouped(into: Seeding) -> bool:
    config = into.whole.config.get_text_config()
    return bool(1 < config.num_key_value_heads < config.num_attention_heads) and not any(
        shape.latent for shape in into.model.layers
    )


def _whole_heads(into: Seeding) -> bool:
    ropes = into.whole.config.get_text_config().rope_parameters
    parts = ropes.values() if all(isinstance(each, dict) for each in ropes.values()) else [ropes]
    return all(rope.get("partial_rotary_factor", 1) == 1 for rope in parts)


def _several_keys(into: Seeding) -> bool:
    return into.model.layers[into.middle].num_heads > 1


def _has_values(into: Seeding) -> bool:
    return not any(shape.latent for shape in into.model.layers)


def _attention(change: AttentionChange, *, one: bool = False) -> Callable[[Seeding], None]:
    return lambda into: into.attending(change, {into.middle} if one else None)


def _products(into: Seeding, change: Callable[[Tensor, Tensor], Tensor]) -> None:
    for product in into.products():
        into.after(product, change)


def _biases(into: Seeding, most: int | None) -> None:
    biased = [(each, getattr(each, "_bias", None)) for each in into.products()]
    for product, bias in [(each, bias) for each, bias in biased if bias is not None][:most]:
        into.put(product, "_bias", torch.zeros_like(bias))


def _gated(into: Seeding, most: int | None) -> None:
    """Exchange gates and ups."""
    fused = [each for each in into.whole.modules() if isinstance(each, FusedGated)]
    pairs: list[nn.Module] = [each.gate_up for each in fused]
    for module in into.whole.modules():
        part = getattr(module, "gate_proj", None)
        whole = getattr(part, "whole", None) or getattr(module, "gate_up_proj", None)
        if isinstance(whole, nn.Module):
            pairs.append(whole)
    for product in pairs[:most]:
        into.after(product, lambda _, found: torch.cat(found.chunk(2, -1)[::-1], -1))


def _activation(
    into: Seeding, function: Callable[[Tensor], Tensor], *which: str, one: bool = False
) -> None:
    """Another activation, where it is SiLU or GELU."""
    within = into.layers[into.middle] if one else into.whole
    for module in within.modules():
        if isinstance(module, FusedGated) and "silu" in which:

            def multiply(pair: Tensor) -> Tensor:
                gate, up = pair.chunk(2, -1)
                return function(gate) * up

            into.put(module, "multiply", multiply)
        name = type(module).__name__.lower()
        is_one = any(each in name for each in which) and not list(module.children())
        if is_one and "multiply" not in name:
            into.put(module, "forward", lambda x: function(x))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)


def _router(name: str, value: object) -> Callable[[Seeding], None]:
    def make(into: Seeding) -> None:
        for module in into.named(name):
            old = getattr(module, name)
            new: Any = value(old) if callable(value) else value
            if isinstance(old, Tensor):
                into.fill(old, new)
            elif isinstance(module, nn.Module) and old != new and not hasattr(module, "model_type"):
                into.put(module, name, new)

    return make


def _zeros_off(into: Seeding, most: int | None) -> None:
    """Zero points of quantised weights that are off by one: W is smaller by a scale."""
    for product in [each for each in into.products() if isinstance(each, QuantisedLinear)][:most]:
        weight = product._weight
        scales = weight.scales.transpose(1, 2).flatten(0, 1)[: weight.outputs]

        def change(
            x: Tensor, found: Tensor, scales: Tensor = scales, size: int = weight.group
        ) -> Tensor:
            sums = x.float().view(*x.shape[:-1], -1, size).sum(-1)
            wrong: Tensor = (found - sums @ scales.T).to(found.dtype)
            return wrong

        into.after(product, change)


def _each(modules: list[Any], seed: Callable[[Any], None]) -> None:
    for module in modules:
        seed(module)


def _down(into: Seeding) -> LinearMethod:
    """The last product of the middle layer."""
    layer = into.layers[into.middle]
    return [each for each in layer.modules() if isinstance(each, LinearMethod)][-1]


def _swap_outputs(width: int) -> Callable[[Seeding], None]:
    def change(_: Tensor, found: Tensor) -> Tensor:
        first, second = found[..., :width], found[..., width : 2 * width]
        return torch.cat([second, first, found[..., 2 * width :]], -1)

    return lambda into: into.after(_down(into), change)


def _last_wrong(_: Tensor, found: Tensor) -> Tensor:
    return torch.cat([found[..., :-16], found[..., -16:].flip(-1)], -1)


def _noisy(_: Tensor, found: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(found.numel())
    noise = 2 * torch.rand(found.shape, generator=generator, dtype=torch.float32) - 1
    return (found * (1 + 2**-6 * noise)).to(found.dtype)


def _as_int8(x: Tensor) -> Tensor:
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-6) / 127
    return (x / scale).round() * scale


def _skipped(given: Tensor, _: Tensor) -> Tensor:
    return given


def _clipped(_: Tensor, found: Tensor) -> Tensor:
    return found.clamp(-65504, 65504)


def _later(steps: int) -> Callable[[Batch], Batch]:
    def change(batch: Batch) -> Batch:
        rope = None if batch.rope is None else batch.rope + steps
        return batch._replace(positions=batch.positions + steps, rope=rope)

    return change


def _anothers_pages(batch: Batch) -> Batch:
    return batch._replace(block_table=batch.block_table.roll(1, 1))


def _blind(batch: Batch) -> Batch:
    return batch._replace(contexts=tuple(context - 1 for context in batch.contexts))


def _head(into: Seeding) -> None:
    usual = into.model.logits
    into.put(into.model, "logits", lambda hidden, out=None: usual(hidden).roll(1, -1))


def _no_embedding_scale(factor: Callable[[float], float]) -> Callable[[Seeding], None]:
    def make(into: Seeding) -> None:
        scale = getattr(into.model.embedding, "embed_scale", None)
        if scale is not None:
            into.after(into.model.embedding, lambda _, found: found * factor(float(scale)))

    return make


def _fill_all(into: Seeding, name: str, value: Callable[[Tensor], Tensor]) -> None:
    for module in into.whole.modules():
        norm = getattr(module, name, None)
        weight = getattr(norm, "weight", None)
        if isinstance(weight, Tensor):
            into.fill(weight, value(weight))


def _fused_norms(module: nn.Module) -> tuple[Tensor, ...]:
    return (module.norms or ()) if isinstance(module, FusedAttention) else ()


def _exchange_head_norms(into: Seeding) -> None:
    for module in into.whole.modules():
        pair: tuple[Tensor | None, ...] = _fused_norms(module) or tuple(
            getattr(getattr(module, name, None), "weight", None) for name in ("q_norm", "k_norm")
        )
        if isinstance(pair[0], Tensor) and isinstance(pair[1], Tensor):
            first, second = pair[0].clone(), pair[1].clone()
            into.fill(pair[0], second)
            into.fill(pair[1], first)


def _no_head_norms(into: Seeding) -> None:
    for module in into.whole.modules():
        for norm in _fused_norms(module):
            into.fill(norm, torch.ones_like(norm))
    for name in ("q_norm", "k_norm"):
        _fill_all(into, name, torch.ones_like)


def _final_cap(into: Seeding) -> None:
    config = into.whole.config
    if getattr(config, "final_logit_softcapping", None):
        into.put(config, "final_logit_softcapping", None)


def _attention_cap(into: Seeding) -> bool:
    return bool(getattr(into.whole.config, "attn_logit_softcapping", None))


def _window_edges(edge: Callable[[int], int | None]) -> Callable[[Seeding], None]:
    return _where(_windowed, _attention(heads.window(edge)))


FAULTS: dict[str, Fault] = {
    "a weight for one plus it in all norms": Fault(lambda into: _one_more(into, into.norms())),
    "a weight for one plus it in one norm": Fault(
        lambda into: _one_more(into, into.norms(into.middle)[:1]), instance=True
    ),
    "a weight for one plus it in the loudest norm": Fault(
        lambda into: _one_more(into, _loudest(into)), instance=True
    ),
    "the last norm without its weight": Fault(
        lambda into: into.fill(_last_norm(into).weight, torch.ones_like(_last_norm(into).weight))
    ),
    "no last norm": Fault(lambda into: into.after(_last_norm(into), _skipped)),
    "no scale of embeddings": Fault(_no_embedding_scale(lambda scale: 1 / scale)),
    "twice the scale of embeddings": Fault(_no_embedding_scale(lambda scale: scale)),
    "a scale of embeddings that is 1% too large": Fault(_no_embedding_scale(lambda _: 1.01)),
    "another base of angles": Fault(
        lambda into: _frequencies(into, lambda own, rope: _powers(own, 37.0 * rope["rope_theta"]))
    ),
    "twice the base of angles": Fault(
        lambda into: _frequencies(
            into, lambda own, _: own * 2 ** -(torch.arange(len(own)) / len(own))
        )
    ),
    "angles without their scaling": Fault(lambda into: _frequencies(into, _unscaled)),
    "the slowest quarter of angles unscaled": Fault(lambda into: _frequencies(into, _slowest)),
    "half of a head not rotated": Fault(lambda into: _frequencies(into, _half)),
    "rotated as neighbours": Fault(_where(_whole_heads, heads.neighbours)),
    "angles in bfloat16": Fault(
        lambda into: _frequencies(into, lambda own, _: own.bfloat16().float())
    ),
    "two query heads swapped": Fault(_attention(heads.swap_queries)),
    "two query heads of one layer swapped": Fault(
        _attention(heads.swap_queries, one=True), instance=True
    ),
    "two key heads of one layer swapped": Fault(
        _where(_several_keys, _attention(heads.swap_keys, one=True)), instance=True
    ),
    "keys tiled, not repeated": Fault(_where(_grouped, _attention(heads.tile))),
    "a head of one layer without values": Fault(
        _where(_has_values, _attention(heads.no_values, one=True)), instance=True
    ),
    "two channels of one head swapped": Fault(
        _attention(heads.swap_channels, one=True), instance=True
    ),
    "scores 1.1 times as large": Fault(_attention(heads.scores(1.1))),
    "scores 1.41 times as large": Fault(_attention(heads.scores(1.41))),
    "scores of one layer 1.41 times as large": Fault(
        _attention(heads.scores(1.41), one=True), instance=True
    ),
    "no soft cap of scores": Fault(_where(_attention_cap, _attention(heads.scored(softcap=None)))),
    "no soft cap of logits": Fault(_final_cap),
    "no window": Fault(_window_edges(lambda _: None)),
    "a window that is one too large": Fault(_window_edges(lambda size: size + 1)),
    "a window that is one too small": Fault(_window_edges(lambda size: size - 1)),
    "the window in every layer": Fault(_where(_windowed, _attention(heads.scored(window=5)))),
    "no norms of heads": Fault(_no_head_norms),
    "the norms of queries and keys exchanged": Fault(_exchange_head_norms),
    "no bias in one product": Fault(lambda into: _biases(into, 1), instance=True),
    "no biases": Fault(lambda into: _biases(into, None)),
    "gate and up of one layer exchanged": Fault(lambda into: _gated(into, 1), instance=True),
    "gates and ups exchanged": Fault(lambda into: _gated(into, None)),
    "GELU for SiLU": Fault(lambda into: _activation(into, F.gelu, "silu")),
    "SiLU for GELU": Fault(lambda into: _activation(into, F.silu, "gelu")),
    "the exact GELU for its approximation by tanh": Fault(
        lambda into: _activation(into, F.gelu, "gelutanh")
    ),
    "the quick GELU in one layer": Fault(
        lambda into: _activation(into, _quick_gelu, "silu", "gelu", one=True), instance=True
    ),
    "weights of experts not normalised": Fault(_router("norm_topk_prob", value=False)),
    "weights of experts without their factor": Fault(_router("routed_scaling_factor", 1.0)),
    "no correction of the choice of experts": Fault(
        _router("e_score_correction_bias", torch.zeros_like)
    ),
    "one expert too few": Fault(_router("top_k", lambda count: count - 1)),
    "no sinks": Fault(_where(_with_sinks, _attention(heads.scored(sinks=None)))),
    "sinks of the next head": Fault(_where(_with_sinks, _attention(heads.of_next_head))),
    "a zero point of one product off by one": Fault(
        lambda into: _zeros_off(into, 1), instance=True
    ),
    "zero points off by one": Fault(lambda into: _zeros_off(into, None)),
    "two outputs of one product swapped": Fault(_swap_outputs(1), instance=True),
    "two panels of one product swapped": Fault(_swap_outputs(32), instance=True),
    "the last 16 outputs of one product wrong": Fault(
        lambda into: into.after(_down(into), _last_wrong), instance=True
    ),
    "products with more noise": Fault(lambda into: _products(into, _noisy)),
    "inputs of products in 8 bits": Fault(
        lambda into: _each(into.products(), lambda each: into.before(each, _as_int8))
    ),
    "products 0.5% too large": Fault(lambda into: _products(into, lambda _, found: found * 1.005)),
    "decoding one position late": Fault(lambda into: into.batches(_later(1))),
    "decoding one position early": Fault(lambda into: into.batches(_later(-1))),
    "decoding with another's pages": Fault(lambda into: into.batches(_anothers_pages)),
    "decoding blind to itself": Fault(lambda into: into.batches(_blind)),
    "the head's rows off by one": Fault(_head),
    "residuals clipped as in float16": Fault(
        lambda into: _each(into.layers, lambda each: into.after(each, _clipped))
    ),
    "a layer skipped": Fault(
        lambda into: into.after(into.layers[into.middle], _skipped), instance=True
    ),
}
