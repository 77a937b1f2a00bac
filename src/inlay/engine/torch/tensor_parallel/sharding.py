"""A rank's share of a model, as in Megatron-LM (Shoeybi et al. 2019, arXiv:1909.08053).

Each rank has some heads of every attention layer and some intermediate elements of every gated
layer. Their last projections give partial sums, which are added over the ranks. The head is divided
by tokens, where their number allows it. Everything else is the same on all ranks.
"""

from typing import Any

from torch import Tensor, nn

from inlay.engine.torch.tensor_parallel.group import TensorParallelGroup
from inlay.engine.torch.weights.quantised.weight import KeptWeight
from inlay.errors import InvalidRequestError

_ATTENTION = ("q_proj", "k_proj", "v_proj"), "o_proj"
_GATED = ("gate_proj", "up_proj"), "down_proj"


class SummedLinear(nn.Module):
    """A linear layer over this rank's inputs, whose outputs are added over the ranks."""

    def __init__(self, linear: nn.Linear, group: TensorParallelGroup) -> None:
        super().__init__()
        self.linear = linear
        self._group = group

    def forward(self, x: Tensor) -> Tensor:
        """Compute [..., in of this rank] to [..., out]."""
        return self._group.add(self.linear(x).contiguous())


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
            setattr(module, output, SummedLinear(last, group))
            divided.update(linears)
            if output == "o_proj":
                _check_shared(module, path)
    for path, module in model.base_model.named_modules():
        if (isinstance(module, nn.Linear) and module not in divided) or "experts" in path:
            raise _refused(f"{path} ({type(module).__name__}) is not divided over ranks")
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


def _part(whole: Tensor, dimension: int, group: TensorParallelGroup) -> nn.Parameter:
    # A copy, so that the whole can be freed.
    part = whole.detach().chunk(group.size, dimension)[group.rank].clone()
    return nn.Parameter(part, requires_grad=False)


def _refused(reason: str) -> InvalidRequestError:
    return InvalidRequestError(f"--tensor-parallel-size: {reason}", param="tensor_parallel_size")


__all__ = ["GatheredLinear", "SummedLinear", "is_divided", "shard"]
