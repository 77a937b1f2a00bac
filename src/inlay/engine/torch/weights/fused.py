"""Fused attention and gated layers of Llama-like models, for CPUs with native kernels, and on CUDA.

In transformers such a layer is some forty operations on small tensors; for few positions, each
costs more to start than to run. Here it is a product, a kernel, attention, a product.

Layers of other kinds are left as they are: latent attention and that of Llama 4, which rotate
neighbours rather than halves; that of Gemma 4, which norms values and shares keys; that of
Qwen3-Next and Qwen3.5, whose product has gates between the queries; and experts, which compute
their gated units by groups.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, cast

from torch import Tensor, nn
from transformers.activations import GELUTanh, SiLUActivation

from inlay.engine.torch.attention.cuda import CudaAttention, CudaKernels
from inlay.engine.torch.attention.native import NativeAttention
from inlay.engine.torch.attention.paged import Projection, Scoring
from inlay.engine.torch.attention.shape import LayerShape
from inlay.engine.torch.native import Kernels
from inlay.engine.torch.self_check.modules import MADE, MADE_FOR_BLOCKS, ModuleCheck
from inlay.engine.torch.weights.linear import FusedPart, RMSNorm
from inlay.engine.torch.weights.linear_methods import BlockLinear

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

_ATTENTION_ON_GPU = _ATTENTION | {
    "Gemma2Attention",
    "Gemma3Attention",
    "GemmaAttention",
    "GptOssAttention",
    "MixtralAttention",
    "Phi3Attention",
    "PhiAttention",
    "Qwen2MoeAttention",
    "Qwen2VLAttention",
    "Qwen2_5OmniAttention",
    "Qwen2_5_VLAttention",
}
"""The same, some with sinks or soft caps."""

_GATED = frozenset({"LlamaMLP", "MistralMLP", "Qwen2MLP", "Qwen3MLP", "Qwen3VLTextMLP"})
"""transformers modules that compute down(silu(gate(x)) * up(x))."""

_GATED_ON_GPU = _GATED | {
    "DeepseekV2MLP",
    "DeepseekV3MLP",
    "Gemma2MLP",
    "Gemma3MLP",
    "Gemma4TextMLP",
    "GemmaMLP",
    "Llama4TextMLP",
    "Phi3MLP",
    "Qwen2MoeMLP",
    "Qwen3MoeMLP",
    "Qwen3NextMLP",
    "Qwen3_5MLP",
    "Qwen3_5MoeMLP",
}
"""Those, and some with GELU in its approximation by tanh."""


_GATED_ROUNDINGS = 3
"""Of the activation, of its product with the ups, and of the result; the fused one has two."""


class FusedAttention(nn.Module):
    """Replacement of an attention module, built from its parts.

    Attributes:
        project: computes queries, keys and values.
        out: computes the output from what was attended.
        layer: its number.
        scoring, norms, eps, query_heads: as in `Projection` and `PagedAttention.attend`.
    """

    def __init__(self, module: Any, product: nn.Module, shape: LayerShape) -> None:
        """Take the parts of `module`; `product` computes queries, keys and values."""
        super().__init__()
        kind = type(module).__name__
        self.project = product
        self.out = module.dense if kind == "PhiAttention" else module.o_proj
        self.layer: int = module.layer_idx
        softcap = module.attn_logit_softcapping if kind == "Gemma2Attention" else None
        sinks: Tensor | None = getattr(module, "sinks", None)
        self.scoring = Scoring(module.scaling, shape.window, softcap, sinks)
        self.query_heads: int = shape.num_heads * module.num_key_value_groups
        # Cosines of GPT-OSS are of one half.
        self._halves = 2 if kind == "GptOssAttention" else 1
        query_norm: Any = getattr(module, "q_norm", None)
        key_norm: Any = getattr(module, "k_norm", None)
        self.norms = None if query_norm is None else (query_norm.weight, key_norm.weight)
        self.eps = 0.0 if query_norm is None else query_norm.eps

    def forward(
        self,
        hidden_states: Tensor,
        position_embeddings: tuple[Tensor, Tensor],
        paged: NativeAttention | CudaAttention,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """Compute as the original module: [1, T, C] to [1, T, C]."""
        cosine, sine = position_embeddings
        projection = Projection(
            self.project(hidden_states)[0],
            cosine[0],
            sine[0],
            self.norms,
            self.eps,
            self.query_heads,
            self._halves * cosine.shape[-1],
        )
        found = paged.attend_projected(self.layer, projection, self.scoring)
        return self.out(found.flatten(1)[None]), None


class FusedGated(nn.Module):
    """Replacement of a gated layer, built from its parts.

    Attributes:
        gate_up: computes gates and ups, which `multiply` joins.
        multiply: likewise.
        gelu: the gate is GELU in its approximation by tanh, not SiLU.
        down: computes the output.
    """

    def __init__(
        self, module: Any, product: nn.Module, multiply: Callable[..., Tensor], *, gelu: bool
    ) -> None:
        """Take the parts of `module`; `product` has gates and ups, which `multiply` joins."""
        super().__init__()
        self.gate_up = product
        self.down = module.down_proj
        self.gelu = gelu
        self.multiply: Callable[[Tensor], Tensor] = partial(multiply, gelu=gelu)

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., C] to [..., C]."""
        found: Tensor = self.down(self.multiply(self.gate_up(x)))
        return found


def fuse(
    model: nn.Module, layers: Sequence[LayerShape], kernels: Kernels, check: ModuleCheck
) -> None:
    """Replace layers of `model` on a CPU in place; other kinds are left unchanged."""
    attention, gated = _ATTENTION, _GATED
    if any(isinstance(module, BlockLinear) for module in model.modules()):
        # Products take so little there that what is between them counts.
        attention, gated = attention | {"Gemma3Attention"}, gated | {"Gemma3MLP"}
    _replace(model, layers, check, attention, gated, kernels.multiply)


def fuse_on_gpu(
    model: nn.Module, layers: Sequence[LayerShape], kernels: CudaKernels, check: ModuleCheck
) -> None:
    """Replace layers of `model` for kernels on CUDA in place; other kinds are left unchanged."""
    _replace(model, layers, check, _ATTENTION_ON_GPU, _GATED_ON_GPU, kernels.multiply)


def _replace(
    model: nn.Module,
    layers: Sequence[LayerShape],
    check: ModuleCheck,
    attention: frozenset[str],
    gated: frozenset[str],
    multiply: Callable[..., Tensor],
) -> None:
    if check.plain:
        return
    like: Tensor = cast("Any", model).base_model.get_input_embeddings().weight
    for path, parent in list(model.named_modules()):
        for name, child in list[tuple[str, Any]](parent.named_children()):
            kind = type(child).__name__
            if kind in attention and _is_plain(child):
                product = _product(child, "q_proj", "qkv_proj")
                if product is not None:
                    fused = FusedAttention(child, product, layers[child.layer_idx])
                    setattr(parent, name, fused)
            elif kind in gated:
                product = _product(child, "gate_proj", "gate_up_proj")
                function = getattr(child, "act_fn", getattr(child, "activation_fn", None))
                gelu = isinstance(function, GELUTanh)
                if product is None or not (gelu or isinstance(function, nn.SiLU | SiLUActivation)):
                    continue
                fused_gated = FusedGated(child, product, multiply, gelu=gelu)
                paths = [f"{path}.{name}.{part}" for part in ("gate_proj", "gate_up_proj")]
                blocks = any(isinstance(part, BlockLinear) for part in child.modules())
                if check.agrees(
                    paths, like.shape[1], like, fused_gated, child,
                    roundings=_GATED_ROUNDINGS, whole=f"{path}.{name}",
                    made=MADE_FOR_BLOCKS if blocks else MADE,
                ):  # fmt: skip
                    setattr(parent, name, fused_gated)


def _product(module: Any, part: str, joint: str) -> nn.Module | None:
    """Return the product of which `part` is one, or which is `joint` as it is; None if neither."""
    found = getattr(module, part, None)
    if isinstance(found, FusedPart):
        return found.whole
    whole: nn.Module | None = getattr(module, joint, None)
    return whole


def _is_plain(module: Any) -> bool:
    """Return True if kernels know the norms of `module`, if it has any."""
    norms = (getattr(module, "q_norm", None), getattr(module, "k_norm", None))
    ours = all(isinstance(norm, RMSNorm | nn.RMSNorm) for norm in norms)
    return (norms == (None, None) or ours) and not getattr(module, "qk_layernorm", False)
