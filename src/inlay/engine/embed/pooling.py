"""Pooling and linear layers: hidden states to vectors.

Computed in float32, whatever the model's dtype is.

Each mode reads one sequence's positions only: a vector does not depend on the rest of its batch.
The formulas are those of sentence-transformers' `Pooling` and `Dense`.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor, nn

from inlay.base.errors import InvalidRequestError
from inlay.embedding.plan import DenseConfig
from inlay.tensors.state_dict import open_state_dict
from inlay.tensors.weight_files import find_pickled, find_weights, weight_files

_ACTIVATIONS: dict[str, type[nn.Module]] = {
    "identity": nn.Identity,
    "tanh": nn.Tanh,
    "relu": nn.ReLU,
    "gelu": nn.GELU,
    "silu": nn.SiLU,
    "sigmoid": nn.Sigmoid,
}


def pool(hidden: Tensor, lengths: Sequence[int], modes: Sequence[str]) -> Tensor:
    """Pool each sequence to one vector: float32 [S, C times the number of modes].

    Args:
        hidden: [T, C], the sequences laid end to end.
        lengths: [S], at least 1 each.
        modes: pooling modes, whose results are concatenated.
    """
    if len(lengths) == len(modes) == 1:
        return _POOLS[modes[0]](hidden)[None]
    # One after another: `segment_reduce` of all takes ten times as long on a CPU.
    sequences = torch.split(hidden, list(lengths))
    pooled = (_POOLS[mode](states) for states in sequences for mode in modes)
    return torch.stack(list(pooled)).view(len(sequences), -1)


def _weighted(states: Tensor) -> Tensor:
    places = torch.arange(1, len(states) + 1, device=states.device)
    return (states.float() * places[:, None]).sum(0) / (len(states) * (len(states) + 1) / 2)


_POOLS: Mapping[str, Callable[[Tensor], Tensor]] = {
    "cls": lambda states: states[0].float(),
    "lasttoken": lambda states: states[-1].float(),
    "max": lambda states: states.amax(0).float(),
    "mean": lambda states: states.mean(0, dtype=torch.float32),
    "mean_sqrt_len_tokens": lambda states: states.sum(0, dtype=torch.float32) / len(states) ** 0.5,
    "weightedmean": _weighted,
}
"""Float32 vector [C] of one sequence's states [its length, C]."""


class Dense(nn.Module):
    """One Dense layer, in float32."""

    def __init__(self, config: DenseConfig) -> None:
        """Read its weights.

        Raises:
            InvalidRequestError: its weights cannot be read, or do not match its configuration.
        """
        super().__init__()
        self._linear = nn.Linear(config.in_features, config.out_features, bias=config.bias)
        self._activation = _ACTIVATIONS[config.activation]()
        weights = _weights(config.path, config.prefix)
        try:
            self._linear.load_state_dict({name: tensor.float() for name, tensor in weights.items()})
        except RuntimeError as error:
            raise InvalidRequestError(f"{config.path} cannot be loaded: {error}") from error
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        """[S, in] to [S, out]."""
        states: Tensor = self._activation(self._linear(x))
        return states


def _weights(path: Path, prefix: str) -> dict[str, Tensor]:
    """Return the tensors whose names begin with `prefix`, without it.

    Of a directory with safetensors, else with a file by `torch.save`, or of such a file.
    """
    found: dict[str, Tensor] = {}
    if path.is_dir() and find_weights(path) is not None:
        for file in weight_files(path).paths():
            with safe_open(file, framework="pt") as tensors:
                for name in tensors.keys():  # noqa: SIM118 (no mapping)
                    if name.startswith(prefix):
                        found[name.removeprefix(prefix)] = tensors.get_tensor(name)
        return found
    for file in pickled_files(path):
        with open_state_dict(file) as saved:
            for each in saved:
                if each.name.startswith(prefix):
                    found[each.name.removeprefix(prefix)] = torch.frombuffer(
                        bytearray(each.read().view), dtype=getattr(torch, each.dtype)
                    ).view(each.shape)
    return found


def pickled_files(path: Path) -> list[Path]:
    """Return the files by `torch.save` that a layer is in.

    Raises:
        InvalidRequestError: the directory has no weights.
    """
    if path.is_file():
        return [path]
    pickled = find_pickled(path)
    return weight_files(path).paths() if pickled is None else pickled.paths()


def dense_layers(configs: Sequence[DenseConfig], size: int) -> nn.Sequential:
    """Build the layers after pooling, whose vectors have `size` elements.

    Raises `InvalidRequestError` if their sizes do not match.
    """
    for config in configs:
        if config.in_features != size:
            raise InvalidRequestError(
                f"{config.path} takes {config.in_features} elements; before it there are {size}"
            )
        size = config.out_features
    return nn.Sequential(*map(Dense, configs))
