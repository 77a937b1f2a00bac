"""Experts: in GGUF's blocks, and of sizes that torch's grouped product refuses; and routers."""

from collections.abc import Callable, Sequence
from ctypes import addressof
from functools import partial
from itertools import accumulate
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers.activations import SiLUActivation

from inlay.engine.torch.native import Kernels
from inlay.engine.torch.native.integers import BlockProduct
from inlay.engine.torch.native.kernels import Call
from inlay.engine.torch.weights.linear_methods import LinearMethod
from inlay.engine.torch.weights.quantised.blocks import ExpertBlocks
from inlay.engine.torch.weights.quantised.weight import KeptWeight

_ALIGNMENT = 16
"""Bytes of which a row of weights or activations must be a multiple there."""

_Run: TypeAlias = tuple[int, int, int]
"""Rows that have one expert: the expert, the first of them, and how many."""

_ROUNDINGS = 4
"""Of gate and up, of what they give together, of what an expert gives, and of their sum."""

_CLAMPED = 20
"""Likewise in float32 where the gate is clamped: one code of eight bits is rounded the other way,
and is large beside what is left of loud inputs.
"""


def compute_apart(model: nn.Module) -> None:
    """Have transformers compute the experts of `model` one after another, where it must."""
    for module in model.modules():
        config: Any = getattr(module, "config", None)
        if not type(module).__name__.endswith("Experts") or config is None:
            continue
        weights = [each for each in module.parameters(recurse=False) if each.dim() > 2]
        sizes = [size * each.itemsize for each in weights for size in each.shape[1:]]
        kept = any(isinstance(each, KeptWeight) for each in weights)
        if kept or any(size % _ALIGNMENT for size in sizes):
            config._experts_implementation = "eager"


class BlockExperts(nn.Module):
    """The experts of a layer in GGUF's blocks: the rows that chose one are one product with it.

    What experts give is summed in float32 and rounded once. Where the gate is SiLU, or GPT-OSS's,
    which a native kernel then computes, the bits of a row do not depend on the others.

    Attributes:
        roundings: that it may differ by from the module that it replaces.
    """

    def __init__(
        self, own: Any, gate_up: ExpertBlocks, down: ExpertBlocks, kernels: Kernels
    ) -> None:
        """Take the place of transformers' module `own`, whose gate this is."""
        super().__init__()
        self._gated: Callable[[Tensor], Tensor] = own._apply_gate
        self.roundings = _ROUNDINGS
        usual = own._apply_gate.__name__ == "_default_apply_gate"
        if usual and isinstance(own.act_fn, nn.SiLU | SiLUActivation):
            # torch's gives parts of a row other bits where threads divide a row.
            self._gated = kernels.silu_and_multiply
        elif own._apply_gate.__qualname__ == "GptOssExperts._apply_gate":
            self._gated = partial(kernels.clamped_gate, alpha=own.alpha, limit=own.limit)
            if own.down_proj.dtype == torch.float32:
                self.roundings = _CLAMPED
        self._gate_up = _products(gate_up, getattr(own, "gate_up_proj_bias", None))
        self._down = _products(down, getattr(own, "down_proj_bias", None))
        self._kernels = kernels

    @property
    def size(self) -> int:
        """Size of the rows."""
        return self._gate_up[0].inputs

    def forward(self, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
        """Compute [T, C] to [T, C]; `chosen` and `weights` [T, K] are of experts."""
        rows, choices = chosen.shape
        if rows == 1:
            # Each of its experts has that row, and all stand in the order of its choice.
            runs = [(expert, at, 1) for at, expert in enumerate(chosen[0].tolist())]
            found = self._multiply(self._down, runs, self._inner(runs, hidden, choices), choices)
        else:
            order = chosen.flatten().argsort(stable=True)
            runs = _runs(chosen.flatten().bincount().tolist())
            inner = self._inner(runs, hidden[order // choices], len(order))
            found = hidden.new_empty(len(order), hidden.shape[-1])
            found[order] = self._multiply(self._down, runs, inner, len(order))
        parts = found.view(rows, choices, -1).float() * weights[..., None].float()
        return parts.sum(1).to(hidden.dtype)

    def _inner(self, runs: Sequence[_Run], x: Tensor, rows: int) -> Tensor:
        return self._gated(self._multiply(self._gate_up, runs, x, rows))

    def _multiply(
        self, products: Sequence[BlockProduct], runs: Sequence[_Run], x: Tensor, rows: int
    ) -> Tensor:
        """Return [S, O]: runs of S rows, each times its expert's matrix, in one native call.

        `x` is [S, I], or [1, I] where all rows are that one.
        """
        out = x.new_empty(rows, products[0].outputs)
        # Slices would take as long as a tenth of a small expert's product.
        step = 0 if x.shape[0] == 1 else x.shape[1] * x.itemsize
        from_, to, width = x.data_ptr(), out.data_ptr(), out.shape[1] * out.itemsize
        made = [
            products[expert].call_at(from_ + start * step, to + start * width, count)
            for expert, start, count in runs
        ]
        kernel = products[0].kernel(x.dtype)
        calls = (Call * len(made))(*[Call(kernel, addressof(call)) for call in made])
        self._kernels.run(calls)
        return out


class RouterWeight(nn.Parameter):
    """A router's weight [E, C]: `F.linear` is by a faster product, with the bias that has."""

    product: LinearMethod

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute, all else with the weight itself."""
        if func is F.linear and len(args) > 1 and isinstance(args[1], RouterWeight):
            return args[1].product(args[0])
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs or {})

    @staticmethod
    def of(weight: Tensor, product: LinearMethod) -> "RouterWeight":
        """Return `weight` itself, in the same memory, with a product of it in another layout."""
        found = RouterWeight(weight.detach(), requires_grad=False)
        found.product = product
        return found


def _runs(counts: Sequence[int]) -> list[_Run]:
    """Return the runs of rows that are sorted by expert, of which each has so many."""
    ends = accumulate(counts)
    return [
        (expert, end - count, count)
        for expert, (end, count) in enumerate(zip(ends, counts, strict=True))
        if count
    ]


_MATRICES = ["gate_up_proj", "down_proj"]


def weights_of_experts(module: nn.Module) -> list[str]:
    """Return the names of a module's matrices of experts, [E, O, I] each, that may be in blocks.

    Empty for what is none, or has biases or another layout, as transformers' module itself says.
    """
    return _MATRICES if _is(module, plain=True) else []


def _is(module: nn.Module, *, plain: bool) -> bool:
    """Return True for experts without biases, or, if not `plain`, for those as GPT-OSS has them."""
    says = {"has_gate": True, "is_concatenated": plain, "is_transposed": not plain}
    says |= {"has_bias": not plain, "has_post_expert_norm": False}
    return all(getattr(module, name, None) is said for name, said in says.items())


def faster_experts(module: nn.Module, kernels: Kernels | None) -> BlockExperts | None:
    """Return the replacement of a module of experts in blocks; None for any other."""
    if kernels is None or not (_is(module, plain=True) or _is(module, plain=False)):
        return None
    weights = [getattr(module, name) for name in _MATRICES]
    match [each.quantised for each in weights if isinstance(each, KeptWeight)]:
        case [ExpertBlocks() as gate_up, ExpertBlocks() as down]:
            return BlockExperts(module, gate_up, down, kernels)
    return None


def routed(experts: nn.Module, count: int) -> Any:
    """Return `experts` as a module of rows [R, C] alone, each of which chooses two of `count`.

    Two more than the first, those in the middle and the last are not: to dequantise all takes long.
    """
    some = torch.tensor([0, count // 2, count - 1])

    def compute(x: Tensor) -> Tensor:
        at = torch.arange(len(x))
        chosen = torch.stack([some[at % 3], some[(at + 1) % 3]], -1)
        weights = torch.tensor([0.7, 0.3]).to(x.dtype).expand(len(x), 2)
        found: Tensor = experts(x, chosen, weights)
        return found

    return compute


def _products(experts: ExpertBlocks, biases: Tensor | None) -> list[BlockProduct]:
    of = [None] * len(experts.experts) if biases is None else biases.detach()
    return [
        each.native.multiplier(each.parts, bias)
        for each, bias in zip(experts.experts, of, strict=True)
    ]
