"""Pooling and Dense layers: hidden states to vectors.

Computed in float32, whatever the model's dtype is.

Each mode reads one sequence's positions only: a vector does not depend on the rest of its batch.
The formulas are those of sentence-transformers' `Pooling` and `Dense`.
"""

from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from inlay.embedding.config import DenseConfig, PoolingMode
from inlay.errors import InvalidRequestError

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}


def pool(hidden: Tensor, lengths: Sequence[int], modes: Sequence[PoolingMode]) -> Tensor:
    """Pool each sequence to one vector: float32 [S, C times the number of modes].

    Args:
        hidden: [T, C], the sequences laid end to end.
        lengths: [S], at least 1 each.
        modes: pooling modes, whose results are concatenated.
    """
    counts = torch.tensor(lengths, device=hidden.device)
    ends = counts.cumsum(0)
    return torch.cat([_pooled(hidden, counts, ends, mode) for mode in modes], dim=1)


def _pooled(hidden: Tensor, counts: Tensor, ends: Tensor, mode: PoolingMode) -> Tensor:
    if mode == "cls":
        return hidden[ends - counts].float()
    if mode == "lasttoken":
        return hidden[ends - 1].float()
    states = hidden.float()
    if mode == "max":
        return torch.segment_reduce(states, "max", lengths=counts, axis=0)
    if mode == "weightedmean":
        owners = torch.repeat_interleave(torch.arange(len(counts), device=hidden.device), counts)
        places = torch.arange(len(states), device=hidden.device) - (ends - counts)[owners] + 1
        total = torch.segment_reduce(states * places[:, None], "sum", lengths=counts, axis=0)
        return total / (counts * (counts + 1) / 2)[:, None]
    total = torch.segment_reduce(states, "sum", lengths=counts, axis=0)
    return total / (counts if mode == "mean" else counts.sqrt())[:, None]


class Dense(nn.Module):
    """One Dense layer, in float32."""

    def __init__(self, config: DenseConfig) -> None:
        """Read its weights.

        Raises:
            InvalidRequestError: its weights are not in safetensors, or do not match its
                configuration.
        """
        super().__init__()
        self._linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)
        self._activation = _ACTIVATIONS[config.activation]()
        weights = _weights(config.directory / "model.safetensors")
        try:
            self._linear.load_state_dict(
                {name.removeprefix("linear."): tensor.float() for name, tensor in weights.items()}
            )
        except RuntimeError as error:
            raise InvalidRequestError(f"{config.directory} cannot be loaded: {error}") from error
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[S, in] to [S, out]."""
        states: Tensor = self._activation(self._linear(x))
        return states


def _weights(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise InvalidRequestError(
            f"{path} is not there; Dense layers are read from safetensors only"
        )
    weights: dict[str, Tensor] = load_file(path)
    return weights


def dense_layers(configs: Sequence[DenseConfig], size: int) -> nn.Sequential:
    """Build the layers after pooling, whose vectors have `size` elements.

    Raises `InvalidRequestError` if their sizes do not match.
    """
    for config in configs:
        if config.in_features != size:
            raise InvalidRequestError(
                f"{config.directory} takes {config.in_features} elements; before it there are "
                f"{size}"
            )
        size = config.out_features
    return nn.Sequential(*map(Dense, configs))
