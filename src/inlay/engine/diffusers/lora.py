"""LoRA adapters of a denoiser: each forward pass has one, or none."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import partial

from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle

from inlay.engine.torch.adapters import read_lows
from inlay.engine.torch.lora import LowRankPair
from inlay.errors import InvalidRequestError


class DenoiserLoras:
    """The adapters that are loaded. On the engine's thread.

    Args:
        denoiser: whose linear layers are adapted; None: this part of a pipeline has none.
        rank: largest of an adapter; None: adapters are off.
    """

    def __init__(self, denoiser: nn.Module | None, rank: int | None) -> None:
        self.rank = rank or 0
        self._refused = None
        if rank is None:
            self._refused = "LoRA adapters are off; start the worker with --enable-lora"
        elif denoiser is None:
            self._refused = "LoRA adapters are of the denoiser, which is a stage of its own here"
        self._loaded: dict[str, Mapping[str, LowRankPair]] = {}
        self._active: Mapping[str, LowRankPair] = {}
        self._shapes: dict[str, tuple[int, int]] = {}
        self._hooks: list[RemovableHandle] = []
        if denoiser is None or rank is None:
            return
        for name, module in denoiser.named_modules():
            if isinstance(module, nn.Linear):
                self._shapes[name] = module.out_features, module.in_features
                self._hooks.append(module.register_forward_hook(partial(self._add, name)))
                self._weight = module.weight

    def shapes(self) -> Mapping[str, tuple[int, int]]:
        """(outputs, inputs) of the layers by name."""
        return self._shapes

    def __contains__(self, name: str) -> bool:
        """Return True if an adapter is there."""
        return name in self._loaded

    def put(self, name: str, directory: str) -> None:
        """Load an adapter. Raises `InvalidRequestError` if it does not fit, or none is taken."""
        if self._refused is not None:
            raise InvalidRequestError(self._refused)
        device, dtype = self._weight.device, self._weight.dtype
        lows = read_lows(directory, self, dtype)
        self._loaded[name] = {
            layer: LowRankPair(low.down.to(device), low.up.to(device))
            for layer, low in lows.items()
        }

    def remove(self, name: str) -> None:
        """Free an adapter, if it is there."""
        self._loaded.pop(name, None)

    def close(self) -> None:
        """Let go of the denoiser, which would keep the adapters."""
        for hook in self._hooks:
            hook.remove()

    @contextmanager
    def used(self, name: str | None) -> Iterator[None]:
        """Have the denoiser compute with an adapter, or none, until the block ends."""
        self._active = {} if name is None else self._loaded[name]
        try:
            yield
        finally:
            self._active = {}

    def _add(
        self, name: str, _: nn.Module, given: tuple[Tensor, ...], output: Tensor
    ) -> Tensor | None:
        low = self._active.get(name)
        return None if low is None else output + (given[0] @ low.down.T) @ low.up
