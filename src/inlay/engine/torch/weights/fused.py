"""Fused attention and gated layers of Llama-like models, for CPUs with native kernels.

In transformers such a layer is some forty operations on small tensors; for few positions, each
costs more to start than to run. Here it is a product, a kernel, attention, a product.
"""

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from transformers.activations import SiLUActivation

from inlay.engine.torch.attention.layers import LayerShape
from inlay.engine.torch.attention.native import NativeAttention, Projection
from inlay.engine.torch.attention.paged import Scoring
from inlay.engine.torch.native import Kernels
from inlay.engine.torch.weights.linear import FusedPart, RMSNorm

_ATTENTION = frozenset(
    {
        "LlamaAttention",
        "MistralAttention",
        "Qwen2Attention",
        "Qwen3Attention",
        "Qwen3MoeAttention",
        "Qwen3VLMoeTextAttention",
        "Qwen3VLTextAttention",
    }
)
"""transformers modules: projections, optional head norms, half rotation, attention, output."""

_GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3VLTextMLP"})
"""transformers modules that compute down(silu(gate(x)) * up(x))."""


class FusedAttention(nn.Module):
    """Replacement of a module of `_ATTENTION`, built from its parts."""

    def __init__(self, module: Any, scoring: Scoring, num_heads: int) -> None:
        """Take the parts of `module`, which has `num_heads` key and value heads."""
        super().__init__()
        self._project = module.q_proj.whole
        self._out = module.o_proj
        self._layer: int = module.layer_idx
        self._scoring = scoring
        self._query_heads: int = num_heads * module.num_key_value_groups
        query_norm: Any = getattr(module, "q_norm", None)
        key_norm: Any = getattr(module, "k_norm", None)
        self._norms = None if query_norm is None else (query_norm.weight, key_norm.weight)
        self._eps = 0.0 if query_norm is None else query_norm.eps

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        paged: NativeAttention,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute as the original module: [1, T, C] to [1, T, C]."""
        cosine, sine = position_embeddings
        projection = Projection(
            self._project(hidden_states)[0],
            cosine[0],
            sine[0],
            self._norms,
            self._eps,
            self._query_heads,
        )
        found = paged.attend_projected(self._layer, projection, self._scoring)
        return self._out(found.flatten(1)[None]), None


class FusedGated(nn.Module):
    """Replacement of a module of `_GATED`, built from its parts."""

    def __init__(self, module: Any, kernels: Kernels) -> None:
        super().__init__()
        self._gate_up = module.gate_proj.whole
        self._down = module.down_proj
        self._kernels = kernels

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., C] to [..., C]."""
        found: Tensor = self._down(self._kernels.silu_and_multiply(self._gate_up(x)))
        return found


def fuse(model: nn.Module, layers: Sequence[LayerShape], kernels: Kernels) -> None:
    """Replace layers of `model` in place; other kinds are left unchanged."""
    for parent in list(model.modules()):
        for name, child in list[tuple[str, Any]](parent.named_children()):
            kind = type(child).__name__
            if kind in _ATTENTION and _is_fused(child, "q_proj") and _norms_are_ours(child):
                shape = layers[child.layer_idx]
                scoring = Scoring(child.scaling, shape.window)
                setattr(parent, name, FusedAttention(child, scoring, shape.num_heads))
            elif (
                kind in _GATED
                and _is_fused(child, "gate_proj")
                and isinstance(child.act_fn, nn.SiLU | SiLUActivation)
            ):
                setattr(parent, name, FusedGated(child, kernels))


def _is_fused(module: nn.Module, projection: str) -> bool:
    return isinstance(getattr(module, projection), FusedPart)


def _norms_are_ours(module: nn.Module) -> bool:
    norms = (getattr(module, "q_norm", None), getattr(module, "k_norm", None))
    return norms == (None, None) or all(isinstance(norm, RMSNorm) for norm in norms)
