"""A rank's share of a model, as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

Each rank has some heads of every attention layer, and some intermediate elements of every gated
layer and of every expert. Their last projections give partial sums, which are added over the ranks.
The head is divided by tokens, where their number allows it. Everything else is on all ranks.
"""

from typing import Any

import torch
from torch import Tensor, nn

from inlay.base.errors import InvalidRequestError
from inlay.engine.torch.tensor_parallel.group import TensorParallelGroup
from inlay.engine.torch.weights.experts import compute_apart
from inlay.engine.torch.weights.quantised.weight import KeptWeight

_ATTENTION = ("q_proj", "k_proj", "v_proj"), "o_proj"
_GATED = ("gate_proj", "up_proj"), "down_proj"

_ON_EVERY_RANK = frozenset({"shared_expert_gate"})
"""Linear layers that are too small to divide."""


class Summed(nn.Module):
    """A module with this rank's share of the weights, whose outputs are added over the ranks."""

    def __init__(self, share: nn.Module, group: TensorParallelGroup) -> None:
        super().__init__()
        self.share = share
        self._group = group

    def forward(self, *inputs: Tensor) -> Tensor:
        """Compute what the whole module would."""
        partial: Tensor = self.share(*inputs)
        return self._group.add(partial.contiguous())


class GatheredLinear(nn.Module):
    """A linear layer for this rank's outputs; rank 0 gets those of all."""

    def __init__(self, linear: nn.Linear, group: TensorParallelGroup) -> None:
        super().__init__()
        self.linear = linear
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in] to [..., out], on ranks but 0 to [..., out of this rank]."""
        return self._group.gather(self.linear(x))


def shard(model: Any, group: TensorParallelGroup) -> None:
    """Keep this rank's share of a causal language model of transformers, in place.

    Raises:
        InvalidRequestError: a layer that cannot be divided; the message names it.
    """
    divided: set[nn.Module] = set()
    for path, module in list(model.base_model.named_modules()):
        for inputs, output in (_ATTENTION, _GATED):
            names = (*inputs, output)
            linears: list[Any] = [getattr(module, name, None) for name in names]
            if not all(type(linear) is nn.Linear for linear in linears):
                continue
            for name in inputs:
                _keep(getattr(module, name), 0, group, f"{path}.{name}")
            last = getattr(module, output)
            _keep(last, 1, group, f"{path}.{output}")
            setattr(module, output, Summed(last, group))
            divided.update(linears)
            if output == "o_proj":
                _check_shared(module, path)
        for name, child in list(module.named_children()):
            if type(child).__name__.endswith("Experts"):
                _keep_experts(child, group, f"{path}.{name}")
                setattr(module, name, Summed(child, group))
    compute_apart(model)
    for path, module in model.base_model.named_modules():
        whole = isinstance(module, nn.Linear) and module not in divided
        if whole and path.rpartition(".")[2] not in _ON_EVERY_RANK:
            raise _not_divided(path, module)
    for name, child in list(model.named_children()):
        # Where tokens do not divide evenly, rank 0 computes all; it alone samples.
        if child is model.get_output_embeddings() and child.out_features % group.size == 0:
            _keep(child, 0, group, name)
            setattr(model, name, GatheredLinear(child, group))


def is_divided(head: Any) -> bool:
    """Return True if all ranks have a part of a model's head."""
    return any(isinstance(module, GatheredLinear) for module in head.children())


def _check_shared(module: Any, path: str) -> None:
    """Refuse what an attention layer has for all heads together."""
    for name, parameter in module.named_parameters():
        if "_norm" in name and parameter.numel() != module.head_dim:
            raise _refused(f"{path}.{name} is a norm of all heads together")
        if name == "sinks":
            raise _refused(f"{path} has sinks, which are not divided over ranks")


def _keep(linear: nn.Linear, dimension: int, group: TensorParallelGroup, path: str) -> None:
    """Keep this rank's outputs (dimension 0) or inputs (1) of `linear`."""
    if isinstance(linear.weight, KeptWeight):
        raise _refused(f"{path} is quantised, and quantised weights are not divided over ranks")
    total = linear.weight.shape[dimension]
    if total % group.size:
        raise _refused(f"{group.size} ranks do not divide the {total} elements of {path}")
    linear.weight = _part(linear.weight, dimension, group)
    if dimension == 0:
        linear.out_features = total // group.size
        if linear.bias is not None:
            linear.bias = _part(linear.bias, 0, group)
    else:
        linear.in_features = total // group.size
        if group.rank:
            # The sum has it once.
            linear.register_parameter("bias", None)


def _keep_experts(experts: Any, group: TensorParallelGroup, path: str) -> None:
    """Keep this rank's intermediate elements of every expert."""
    shapes = {name: tuple(weight.shape) for name, weight in experts.named_parameters()}
    count, hidden, inner = shapes.get("down_proj", (0, 0, 0))
    expected = {"gate_up_proj": (count, 2 * inner, hidden), "down_proj": (count, hidden, inner)}
    if shapes != expected:
        raise _not_divided(path, experts)
    if inner % group.size:
        raise _refused(f"{group.size} ranks do not divide the {inner} elements of {path}")
    halves: list[Tensor] = [_part(half, 1, group) for half in experts.gate_up_proj.chunk(2, 1)]
    experts.gate_up_proj = nn.Parameter(torch.cat(halves, 1), requires_grad=False)
    experts.down_proj = _part(experts.down_proj, 2, group)
    experts.intermediate_dim = inner // group.size


def _part(whole: Tensor, dimension: int, group: TensorParallelGroup) -> nn.Parameter:
    # A copy, so that the whole can be freed.
    part = whole.detach().chunk(group.size, dimension)[group.rank].clone()
    return nn.Parameter(part, requires_grad=False)


def _not_divided(path: str, module: nn.Module) -> InvalidRequestError:
    return _refused(f"{path} ({type(module).__name__}) is not divided over ranks")


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"--tensor-parallel-size: {reason}", param="tensor_parallel_size")
