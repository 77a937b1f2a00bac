"""Batch invariance: the bits of a position depend on nothing that is computed beside it.

Neither on other sequences, nor on the chunks of its own, nor on whether it is computed again where
a request goes on elsewhere (He et al., "Defeating Nondeterminism in LLM Inference", 2025).
Products, norms and attention then add in an order of the position's own; what is left are
operations on single elements.
"""

from typing import Any, cast

import torch
from torch import nn

from inlay.engine.torch.lora import AdaptedLinear
from inlay.engine.torch.native import Kernels
from inlay.engine.torch.tensor_parallel.group import TensorParallelGroup
from inlay.engine.torch.weights.fused import FusedAttention, FusedGated
from inlay.engine.torch.weights.linear import RMSNorm, RotaryTable
from inlay.engine.torch.weights.linear_methods import LinearMethod

_MODELS = frozenset(
    {
        "Gemma3ForCausalLM",
        "LlamaForCausalLM",
        "MistralForCausalLM",
        "Qwen2ForCausalLM",
        "Qwen3ForCausalLM",
    }
)
"""transformers models which are nothing but the modules checked here, and sums of two tensors."""


def make_invariant(
    model: Any, native: Kernels | None, group: TensorParallelGroup | None
) -> str | None:
    """Make what is left of a loaded model invariant, if all of it can be.

    Returns:
        None, or why it cannot be.
    """
    if model.device.type != "cpu":
        return "the kernels of a GPU choose their order of sums by the size of a batch"
    if group is not None:
        return "sums over the ranks of --tensor-parallel-size depend on the size of a batch"
    if model.dtype is not torch.bfloat16:
        name = str(model.dtype).removeprefix("torch.")
        return f"products in {name} are oneDNN's, which chooses its order of sums by their size"
    if native is None:
        return "there are no native kernels here, and torch's depend on the size of a batch"
    if type(model).__name__ not in _MODELS:
        families = ", ".join(sorted(name.removesuffix("ForCausalLM") for name in _MODELS))
        return (
            f"it is known of these families alone: {families}; this is {type(model).__name__}, "
            "with operations of torch whose order of sums may depend on the size of a batch"
        )
    if getattr(model.config, "final_logit_softcapping", None) is not None:
        return "how torch rounds a soft cap of logits may depend on an element's place in a tensor"
    body = model.base_model
    for path, module in model.named_modules():
        if path.endswith(".self_attn") and not isinstance(module, FusedAttention):
            return f"{path} is not computed by native kernels"
        if path.endswith(".mlp") and not isinstance(module, FusedGated):
            return f"{path} is not computed by native kernels"
        if isinstance(module, LinearMethod | RMSNorm | AdaptedLinear) and not module.invariant:
            return f"the order of sums of {path} depends on the number of rows on this CPU"
        if isinstance(module, nn.Linear) or (
            type(module).__name__.endswith("Norm") and not isinstance(module, RMSNorm)
        ):
            return f"{path} is not computed by native kernels"
    body.rotary_emb = RotaryTable(cast("nn.Module", body.rotary_emb))
    return None
